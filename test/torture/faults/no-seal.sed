# src/expiry.c: retention counts from completed_at alone, not from the sealing.
s/note->sealed_at > cutoff/false/
