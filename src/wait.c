/*-------------------------------------------------------------------------
 *
 * wait.c
 *	  Locks of keys, waiting with a deadline, and looking a locked key up.
 *
 * The lock of a key is a transaction-level advisory lock of a class of its
 * own, charged to CurTransactionResourceOwner: a claim lives as long as its
 * (sub)transaction, whatever becomes of the portal it was made in.
 *
 * A wait that may end without an error is done in an internal subtransaction
 * whose lock_timeout is what is left until the deadline; the failed lock
 * attempt is rolled back with it.  On success the subtransaction commits,
 * which hands the lock to its parent.  The user's own lock_timeout counts
 * where it is shorter, and then fails as it does for any lock; deadlocks,
 * cancel and statement_timeout are errors as everywhere.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/proc.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"

#include "activity.h"
#include "compat.h"
#include "record.h"
#include "stats.h"
#include "store.h"
#include "wait.h"

/* What is waited for: a key's lock, or the end of a transaction */
typedef struct WaitTarget
{
	const LOCKTAG *tag;
	TransactionId xid;			/* if tag is NULL */
	Oid			store;			/* for statistics, else InvalidOid */
	const text *key;
} WaitTarget;

static LockAcquireResult
acquire(const LOCKTAG *tag, bool dont_wait)
{
	ResourceOwner oldowner = CurrentResourceOwner;
	LockAcquireResult result = LOCKACQUIRE_NOT_AVAIL;

	CurrentResourceOwner = CurTransactionResourceOwner;
	PG_TRY();
	{
		result = LockAcquire(tag, ExclusiveLock, false, dont_wait);
	}
	PG_FINALLY();
	{
		CurrentResourceOwner = oldowner;
	}
	PG_END_TRY();
	return result;
}

/*
 * Try to lock a key without waiting.  Every success must be undone by one
 * idem_key_unlock(), or kept to the end of the (sub)transaction.
 */
bool
idem_key_lock(const LOCKTAG *tag)
{
	return acquire(tag, true) != LOCKACQUIRE_NOT_AVAIL;
}

/*
 * Undo one acquisition by this subtransaction, and no other.
 */
void
idem_key_unlock(const LOCKTAG *tag)
{
	ResourceOwner oldowner = CurrentResourceOwner;

	CurrentResourceOwner = CurTransactionResourceOwner;
	if (!LockRelease(tag, ExclusiveLock, false))
		elog(ERROR, "lost the lock of an idempotency key");
	CurrentResourceOwner = oldowner;
}

static void
wait_for(const WaitTarget *target)
{
	if (target->tag != NULL)
		(void) acquire(target->tag, false);
	else
		XactLockTableWait(target->xid, NULL, NULL, XLTW_None);
}

/*
 * Wait in a subtransaction with a lock_timeout of its own; false if that
 * ran out.
 */
static bool
wait_in_subtransaction(const WaitTarget *target, int timeout_ms)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	volatile bool success = true;
	char		value[32];

	snprintf(value, sizeof(value), "%d", timeout_ms);
	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		int			nestlevel = NewGUCNestLevel();

		(void) set_config_option("lock_timeout", value, PGC_USERSET,
								 PGC_S_SESSION, GUC_ACTION_SAVE, true, 0,
								 false);
		wait_for(target);
		AtEOXact_GUC(true, nestlevel);
		ReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = owner;
	}
	PG_CATCH();
	{
		ErrorData  *edata;

		MemoryContextSwitchTo(context);
		edata = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = owner;
		if (edata->sqlerrcode != ERRCODE_LOCK_NOT_AVAILABLE)
			ReThrowError(edata);
		FreeErrorData(edata);
		success = false;
	}
	PG_END_TRY();
	return success;
}

/*
 * Wait, with a lock_timeout unless that is 0; false if it ran out.  However
 * the wait ends, statistics know of it.
 */
static bool
timed_wait(const WaitTarget *target, int timeout_ms)
{
	TimestampTz start;
	int			stats;
	volatile bool success = true;

	if (!OidIsValid(target->store) || !idem_track)
	{
		if (timeout_ms > 0)
			return wait_in_subtransaction(target, timeout_ms);
		wait_for(target);
		return true;
	}

	stats = idem_stats_find(target->store);
	start = GetCurrentTimestamp();
	idem_activity_wait(target->store, target->key, start);
	PG_TRY();
	{
		if (timeout_ms > 0)
			success = wait_in_subtransaction(target, timeout_ms);
		else
			wait_for(target);
	}
	PG_FINALLY();
	{
		idem_activity_waited();
		idem_stats_wait(stats, target->store, GetCurrentTimestamp() - start);
	}
	PG_END_TRY();
	return success;
}

/*
 * Wait until the deadline (DT_NOEND: without one); false if it passes.
 */
static bool
wait_until(const WaitTarget *target, TimestampTz deadline)
{
	TimestampTz now;
	int64		ms;

	if (deadline == DT_NOEND)
		return timed_wait(target, 0);

	now = GetCurrentTimestamp();
	if (deadline <= now)
		return false;
	ms = Min((deadline - now + 999) / 1000, INT_MAX);
	return timed_wait(target, LockTimeout > 0 && LockTimeout <= ms ? 0 :
					  (int) ms);
}

/*
 * Lock a key, waiting until the deadline; false if it passes.
 */
bool
idem_key_lock_wait(const LOCKTAG *tag, TimestampTz deadline)
{
	WaitTarget	target = {.tag = tag};

	return wait_until(&target, deadline);
}

/*
 * Wait for the end of a transaction until the deadline; false if it passes.
 */
bool
idem_xact_wait(TransactionId xid, TimestampTz deadline)
{
	WaitTarget	target = {.xid = xid};

	if (idem_xact_wait_conditional(xid))
		return true;
	return wait_until(&target, deadline);
}

/*
 * A final record says that the operation is over.
 */
static bool
is_final(const IdemRecord *record)
{
	return record->found && (record->status == IDEM_COMPLETED ||
							 record->status == IDEM_SKIPPED);
}

/*
 * Lock "key" and look it up, waiting until the deadline for whoever holds it
 * or is writing its record.
 *
 * With "peek", a key that cannot be locked at once is first looked up without
 * the lock, never waiting: a final, committed record is then the answer, so
 * that many waiters are answered together and a momentary holder does not
 * make a completed key look busy.
 */
IdemKeyState
idem_key_lock_and_find(IdemStore **store, text *key, const LOCKTAG *tag,
			  TimestampTz deadline, bool peek, IdemRecord *record)
{
	for (;;)
	{
		WaitTarget	target = {.store = (*store)->relid,.key = key};

		CHECK_FOR_INTERRUPTS();
		if (!idem_key_lock(tag))
		{
			memset(record, 0, sizeof(IdemRecord));
			if (peek)
			{
				*store = idem_store_refresh(*store);
				idem_record_find(store, key, record);
				if (is_final(record) && !TransactionIdIsValid(record->in_flux))
					return KEY_ANSWERED;
			}
			target.tag = tag;
			if (!wait_until(&target, deadline))
				return KEY_NOT_LOCKED;
		}

		*store = idem_store_refresh(*store);
		idem_record_find(store, key, record);
		if (!TransactionIdIsValid(record->in_flux))
			return KEY_LOCKED;
		idem_key_unlock(tag);
		target.tag = NULL;
		target.xid = record->in_flux;
		if (!idem_xact_wait_conditional(target.xid) &&
			!wait_until(&target, deadline))
			return KEY_NOT_LOCKED;
	}
}
