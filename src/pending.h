/*-------------------------------------------------------------------------
 *
 * pending.h
 *	  The claims of the running transaction.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_PENDING_H
#define IDEM_PENDING_H

#include "datatype/timestamp.h"
#include "storage/itemptr.h"
#include "storage/lock.h"
#include "utils/uuid.h"

typedef enum IdemClaimState
{
	CLAIM_NONE,					/* given up, or undone by a savepoint */
	CLAIM_HELD,					/* told "claimed", not completed */
	CLAIM_COMPLETED,			/* its record is written */
	CLAIM_LEASED				/* a lease was taken, not yet committed */
} IdemClaimState;

/*
 * What statistics make of a claim when its transaction ends, as things stand.
 */
typedef struct IdemTally
{
	int			claims;			/* rolled back with the transaction */
	int			executed;
	int			released;
	int			leases;
	int			retried;
	int			resolved;
} IdemTally;

/* The part of a claim that a savepoint can take back */
typedef struct IdemClaimStatus
{
	IdemClaimState state;
	int			nest_level;		/* of the subtransaction that set it */
	bool		locked;			/* the key's lock is held */
	bool		has_row;		/* made good early by an uncommitted row */
	int			row_generation; /* ... here */
	ItemPointerData row_tid;
	bool		replaces;		/* a released record was there */
	bool		has_fingerprint;
	pg_uuid_t	fingerprint;
	TimestampTz claimed_at;
	IdemTally	tally;
} IdemClaimStatus;

typedef struct IdemClaim
{
	Oid			store;
	uint64		hash;			/* of store and key: the lock's identity */
	text	   *key;
	int			stats;			/* where it is counted; see stats.h */
	int			activity;		/* where it is listed; see activity.h */
	bool		unfinished;		/* COMMIT was refused because of it */
	IdemClaimStatus status;		/* change it with idem_pending_set() only */
} IdemClaim;

extern void idem_pending_init(void);
extern IdemClaim *idem_pending_find(Oid store, const text *key, uint64 hash);
extern IdemClaim *idem_pending_add(Oid store, const text *key, uint64 hash);
extern void idem_pending_set(IdemClaim *claim, const IdemClaimStatus *status);
extern int	idem_pending_locks(void);
extern void idem_pending_require_durable(void);

#endif							/* IDEM_PENDING_H */
