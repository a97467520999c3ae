/*-------------------------------------------------------------------------
 *
 * key.h
 *	  Rules of an idempotency key, and the lock that stands for it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_KEY_H
#define IDEM_KEY_H

#include "storage/lock.h"

/* A key is 1 to this many bytes, in the database's encoding */
#define IDEM_KEY_MAX_BYTES 512

extern void idem_check_key(const text *key);
extern bool idem_key_is_valid(const text *key);
extern uint64 idem_key_hash(Oid store, const text *key);
extern void idem_key_locktag(LOCKTAG *tag, uint64 hash);

#endif							/* IDEM_KEY_H */
