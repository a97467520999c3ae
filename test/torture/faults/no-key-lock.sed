# src/key.c: each backend has a lock of its own for a key, so it keeps nobody out.
s/SET_LOCKTAG_ADVISORY(\*tag, MyDatabaseId,/SET_LOCKTAG_ADVISORY(*tag, (Oid) MyProcPid,/
