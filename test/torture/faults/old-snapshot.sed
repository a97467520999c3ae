# src/wait.c: under its lock, a key is looked up as the statement's snapshot sees it.
s/^#include "utils\/timestamp\.h"/#include "utils\/snapmgr.h"\n&/
s/idem_record_find(store, key, record)/idem_record_find_mvcc(store, key, GetActiveSnapshot(), record)/
