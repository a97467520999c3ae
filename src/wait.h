/*-------------------------------------------------------------------------
 *
 * wait.h
 *	  Locks of keys, and waiting with a deadline.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_WAIT_H
#define IDEM_WAIT_H

#include "datatype/timestamp.h"
#include "storage/lock.h"

extern bool idem_key_lock(const LOCKTAG *tag, bool *already_held);
extern void idem_key_unlock(const LOCKTAG *tag);
extern bool idem_key_lock_wait(const LOCKTAG *tag, TimestampTz deadline);
extern bool idem_xact_wait(TransactionId xid, TimestampTz deadline);

#endif							/* IDEM_WAIT_H */
