/*-------------------------------------------------------------------------
 *
 * pending.c
 *	  The claims of the running transaction.
 *
 * A claim is nothing but backend memory and the lock of its key until it is
 * completed, so this list is asked before any lock or table.  It lives in
 * TopTransactionContext and is forgotten at commit, abort and the end of
 * PREPARE, when the locks have passed to the prepared transaction.
 *
 * Savepoints: every change of a claim that an open savepoint could take back
 * leaves its previous status in an undo log.  Levels in the log never
 * decrease from older to younger entries, because a subtransaction that
 * commits hands its entries to its parent.  So a rollback pops entries off
 * the end, and neither callback allocates or can fail.  What happens to the
 * claim here happens to its lock, its row and the partition lock in the
 * resource owner and the heap of the same subtransaction.
 *
 * Each claim carries what it will count for once the transaction ends, and a
 * rollback to a savepoint takes that back, too.  Counting needs neither memory
 * nor locks; see stats.c.
 *
 * Before commit and PREPARE a claim that was neither completed nor released
 * is an error: the work may be half done, and nothing would keep a second
 * run away.  This is only a check; nothing is written at that point.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/memutils.h"

#include "activity.h"
#include "compat.h"
#include "idem.h"
#include "key.h"
#include "pending.h"
#include "stats.h"
#include "store.h"

/* Set of claims, found by store and key */
typedef struct ClaimSlot
{
	IdemClaim  *claim;
	char		status;
} ClaimSlot;

static inline bool
same_claim(const IdemClaim *a, const IdemClaim *b)
{
	return a->hash == b->hash && a->store == b->store &&
		VARSIZE_ANY_EXHDR(a->key) == VARSIZE_ANY_EXHDR(b->key) &&
		memcmp(VARDATA_ANY(a->key), VARDATA_ANY(b->key),
			   VARSIZE_ANY_EXHDR(a->key)) == 0;
}

#define SH_PREFIX claimset
#define SH_ELEMENT_TYPE ClaimSlot
#define SH_KEY_TYPE IdemClaim *
#define SH_KEY claim
#define SH_HASH_KEY(tb, key) ((uint32) ((key)->hash ^ ((key)->hash >> 32)))
#define SH_EQUAL(tb, a, b) same_claim(a, b)
#define SH_SCOPE static inline
#define SH_DECLARE
#define SH_DEFINE
#include "lib/simplehash.h"

typedef struct UndoEntry
{
	IdemClaim  *claim;
	int			nest_level;		/* a rollback to below this takes it back */
	IdemClaimStatus was;
} UndoEntry;

static claimset_hash *claims = NULL;
static UndoEntry *undo = NULL;
static int	undo_used = 0;
static int	undo_size = 0;
static int	locks_held = 0;		/* claims whose status says "locked" */
static bool require_durable = false;	/* a lease was taken or changed */

/*
 * Find the claim of a key, or NULL.  It may be in state CLAIM_NONE.
 */
IdemClaim *
idem_pending_find(Oid store, const text *key, uint64 hash)
{
	IdemClaim	probe;
	ClaimSlot  *slot;

	if (claims == NULL)
		return NULL;
	probe.store = store;
	probe.key = unconstify(text *, key);
	probe.hash = hash;
	slot = claimset_lookup(claims, &probe);
	return slot ? slot->claim : NULL;
}

/*
 * Find or add the claim of a key; a new one is in state CLAIM_NONE.
 */
IdemClaim *
idem_pending_add(Oid store, const text *key, uint64 hash)
{
	IdemClaim  *claim = idem_pending_find(store, key, hash);
	bool		found;

	if (claim != NULL)
		return claim;

	if (claims == NULL)
		claims = claimset_create(TopTransactionContext, 8, NULL);
	claim = MemoryContextAllocZero(TopTransactionContext, sizeof(IdemClaim));
	claim->store = store;
	claim->hash = hash;
	claim->key = MemoryContextAlloc(TopTransactionContext,
									VARHDRSZ + VARSIZE_ANY_EXHDR(key));
	SET_VARSIZE(claim->key, VARHDRSZ + VARSIZE_ANY_EXHDR(key));
	memcpy(VARDATA(claim->key), VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key));
	claim->status.state = CLAIM_NONE;
	claim->status.nest_level = 1;
	claimset_insert(claims, claim, &found);
	Assert(!found);
	return claim;
}

static void
replace_status(IdemClaim *claim, const IdemClaimStatus *status)
{
	locks_held += (int) status->locked - (int) claim->status.locked;
	claim->status = *status;
}

/*
 * Change the status of a claim on behalf of the current subtransaction.
 */
void
idem_pending_set(IdemClaim *claim, const IdemClaimStatus *status)
{
	IdemClaimStatus new_status = *status;

	new_status.nest_level = GetCurrentTransactionNestLevel();
	if (claim->status.nest_level < new_status.nest_level)
	{
		if (undo_used == undo_size)
		{
			int			size = undo_size ? undo_size * 2 : 16;

			if (undo == NULL)
				undo = MemoryContextAllocHuge(TopTransactionContext,
											  size * sizeof(UndoEntry));
			else
				undo = repalloc_huge(undo, size * sizeof(UndoEntry));
			undo_size = size;
		}
		undo[undo_used].claim = claim;
		undo[undo_used].nest_level = new_status.nest_level;
		undo[undo_used].was = claim->status;
		undo_used++;
	}
	replace_status(claim, &new_status);
}

/*
 * How many key locks this transaction holds for its claims.
 */
int
idem_pending_locks(void)
{
	return locks_held;
}

/*
 * Before commit or PREPARE: no unfinished claim, no lost lock.
 */
static void
check_finished(void)
{
	claimset_iterator it;
	ClaimSlot  *slot;
	IdemClaim  *unfinished = NULL;
	int			count = 0;

	claimset_start_iterate(claims, &it);
	while ((slot = claimset_iterate(claims, &it)) != NULL)
	{
		IdemClaim  *claim = slot->claim;

		if (claim->status.state == CLAIM_HELD)
		{
			unfinished = claim;
			claim->unfinished = true;
			count++;
		}
		else if (claim->status.state == CLAIM_COMPLETED &&
				 claim->status.locked)
		{
			LOCKTAG		tag;

			idem_key_locktag(&tag, claim->hash);
			if (!idem_lock_held(&tag, ExclusiveLock))
				elog(ERROR, "lost the lock of idempotency key \"%s\"",
					 text_to_cstring(claim->key));
		}
	}
	if (unfinished != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_UNFINISHED_CLAIM),
				 errmsg_plural("transaction ends with %d unfinished claim",
							   "transaction ends with %d unfinished claims",
							   count, count),
				 errdetail("The key is \"%s\" in store %s.",
						   text_to_cstring(unfinished->key),
						   idem_store_name(unfinished->store)),
				 errhint("Call idem_complete() or idem_release() in the transaction that claimed the key, before it commits.")));
}

/*
 * Once the lease is committed its holder acts on it, so the commit must be
 * durable, on the standbys too, whatever the session has set.
 */
static void
make_commit_durable(void)
{
	if (synchronous_commit < SYNCHRONOUS_COMMIT_ON)
		(void) set_config_option("synchronous_commit", "on", PGC_USERSET,
								 PGC_S_SESSION, GUC_ACTION_LOCAL, true, 0,
								 false);
}

/*
 * Count what the claims have come to.
 */
static void
count_all(bool committed)
{
	claimset_iterator it;
	ClaimSlot  *slot;

	claimset_start_iterate(claims, &it);
	while ((slot = claimset_iterate(claims, &it)) != NULL)
	{
		IdemClaim  *claim = slot->claim;
		const IdemTally *tally = &claim->status.tally;
		int			stats = claim->stats;
		Oid			store = claim->store;
		bool		unfinished = claim->unfinished && tally->claims > 0;

		if (stats == 0)
			continue;
		if (committed)
		{
			idem_stats_add(stats, store, COUNT_EXECUTED, tally->executed);
			idem_stats_add(stats, store, COUNT_RELEASED, tally->released);
			idem_stats_add(stats, store, COUNT_LEASES, tally->leases);
			idem_stats_add(stats, store, COUNT_RETRIED, tally->retried);
			idem_stats_add(stats, store, COUNT_RESOLVED, tally->resolved);
		}
		else
		{
			idem_stats_add(stats, store, COUNT_UNFINISHED, unfinished);
			idem_stats_add(stats, store, COUNT_ROLLED_BACK,
						   tally->claims - unfinished);
		}
	}
	idem_activity_end();
}

/*
 * The commit of this transaction must be durable.  (A rollback to a
 * savepoint does not take that back; it does no harm.)
 */
void
idem_pending_require_durable(void)
{
	require_durable = true;
}

static void
forget_all(void)
{
	require_durable = false;
	claims = NULL;
	undo = NULL;
	undo_used = undo_size = 0;
	locks_held = 0;
}

static void
xact_callback(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
		case XACT_EVENT_PRE_PREPARE:
			if (claims != NULL)
				check_finished();
			if (require_durable)
				make_commit_durable();
			break;
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PREPARE:
			if (claims != NULL)
				count_all(event != XACT_EVENT_ABORT);
			forget_all();
			break;
		default:
			break;
	}
}

/*
 * Undo one change of a claim that a savepoint took back.
 */
static void
take_back(const UndoEntry *entry)
{
	IdemClaim  *claim = entry->claim;

	idem_stats_add(claim->stats, claim->store, COUNT_ROLLED_BACK,
				   claim->status.tally.claims - entry->was.tally.claims);
	replace_status(claim, &entry->was);
	if (claim->status.state == CLAIM_NONE && claim->activity != 0)
	{
		idem_activity_drop(claim->activity);
		claim->activity = 0;
	}
}

static void
subxact_callback(SubXactEvent event, SubTransactionId mySubid,
				 SubTransactionId parentSubid, void *arg)
{
	int			level;

	if (claims == NULL)
		return;
	level = GetCurrentTransactionNestLevel();

	if (event == SUBXACT_EVENT_COMMIT_SUB)
	{
		int			first = undo_used;
		int			keep;

		/*
		 * What was done here now counts as done by the parent.  Where the
		 * parent had changed the claim before, its own entry is enough.
		 */
		while (first > 0 && undo[first - 1].nest_level >= level)
			first--;
		keep = first;
		for (int i = first; i < undo_used; i++)
		{
			if (undo[i].claim->status.nest_level >= level)
				undo[i].claim->status.nest_level = level - 1;
			if (undo[i].was.nest_level < level - 1)
			{
				undo[keep] = undo[i];
				undo[keep++].nest_level = level - 1;
			}
		}
		undo_used = keep;
	}
	else if (event == SUBXACT_EVENT_ABORT_SUB)
	{
		while (undo_used > 0 && undo[undo_used - 1].nest_level >= level)
		{
			take_back(&undo[--undo_used]);
		}
	}
}

/*
 * Once per process.
 */
void
idem_pending_init(void)
{
	RegisterXactCallback(xact_callback, NULL);
	RegisterSubXactCallback(subxact_callback, NULL);
}
