CALL expire_f(:day, :days, now())
