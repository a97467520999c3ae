/*-------------------------------------------------------------------------
 *
 * wait.h
 *	  Locks of keys, waiting with a deadline, and looking a locked key up.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_WAIT_H
#define IDEM_WAIT_H

#include "datatype/timestamp.h"
#include "storage/lock.h"

struct IdemStore;
struct IdemRecord;

/* How idem_key_lock_and_find() left the key */
typedef enum IdemKeyState
{
	KEY_LOCKED,
	KEY_ANSWERED,				/* not locked: a final record stands */
	KEY_NOT_LOCKED				/* the deadline has passed */
} IdemKeyState;

extern bool idem_key_lock(const LOCKTAG *tag);
extern void idem_key_unlock(const LOCKTAG *tag);
extern bool idem_key_lock_wait(const LOCKTAG *tag, TimestampTz deadline);
extern IdemKeyState idem_key_lock_and_find(struct IdemStore **store, text *key,
										   const LOCKTAG *tag,
										   TimestampTz deadline, bool peek,
										   struct IdemRecord *record);
extern bool idem_xact_wait(TransactionId xid, TimestampTz deadline);

#endif							/* IDEM_WAIT_H */
