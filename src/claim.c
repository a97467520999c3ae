/*-------------------------------------------------------------------------
 *
 * claim.c
 *	  Claim, complete and release keys inside a transaction.
 *
 * The order of steps is what makes it safe:
 *
 * 1. The claims of this transaction are asked first; they need no lock.
 * 2. The key is locked.  If that would wait, the key is looked up without
 *	  the lock: a record that is final and committed is the answer, since
 *	  nothing but idem_forget() can change it.  Otherwise the lock is waited
 *	  for, until the caller's deadline.
 * 3. Invalidations are accepted, and the key is looked up in every
 *	  generation as of now, not as of some snapshot that is older than the
 *	  lock.  A record that another transaction is just writing without the
 *	  lock (a plain INSERT, or a claim made good early) makes us let go of
 *	  the lock and wait for that transaction; then start over.
 * 4. A record is answered, and this call's own acquisition of the lock is
 *	  undone.  An absence is a claim: the lock stays to the end of the
 *	  (sub)transaction, nothing is written yet.
 *
 * So between the look-up that found nothing and the commit of the completion
 * nobody else gets past step 2, and whoever comes after sees the record.
 *
 * A transaction of very many claims would run out of shared lock table.
 * Beyond half of max_locks_per_transaction a claim is made good at once: a
 * record with status "released" is inserted, which means "nothing was done"
 * should it ever be committed, and the key's lock is let go.  Others then
 * find the uncommitted row in step 3.
 *
 * Nothing here may turn a failure into an answer: each function either
 * reaches its answer by the steps above or raises an error.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "activity.h"
#include "answer.h"
#include "bookkeeping.h"
#include "claim.h"
#include "compat.h"
#include "fingerprint.h"
#include "idem.h"
#include "key.h"
#include "pending.h"
#include "record.h"
#include "stats.h"
#include "store.h"
#include "wait.h"
#include "write.h"

/*
 * The deadline that the setting idem.wait_timeout gives a call made now.
 */
TimestampTz
idem_deadline_default(void)
{
	if (idem_wait_timeout < 0)
		return DT_NOEND;
	return GetCurrentTimestamp() + idem_wait_timeout * INT64CONST(1000);
}

/*
 * Refuse what cannot end in a durable record, before any lock is taken.
 */
void
idem_check_may_write(const char *function)
{
	PreventCommandIfReadOnly(function);
	PreventCommandDuringRecovery(function);
	PreventCommandIfParallelMode(function);
	if (InSecurityRestrictedOperation())
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("cannot execute %s within a security-restricted operation",
						function),
				 errhint("Do not call it in index expressions, materialized views or anything else that maintenance commands evaluate.")));
}

/*
 * Replace the key's lock by an uncommitted row that others wait for.
 */
static void
make_good(IdemStore *store, text *key, IdemRecord *old,
		  IdemClaimStatus *status)
{
	IdemRecord	record;

	idem_record_init(&record, key, IDEM_RELEASED, status->claimed_at);
	record.values[IDEM_ATTEMPTS] = Int32GetDatum(idem_record_attempts(old));
	if (old->found)
		idem_record_replace(store, key, old, &record);
	else
		idem_record_insert(store, key, false, &record);
	status->has_row = true;
	status->row_generation = record.generation;
	status->row_tid = record.tid;
}

/*
 * Claim a key for idem_claim_key(), which counts the answer at *stats.
 */
static IdemAnswer
claim_key(const IdemClaimOptions *options, text *key, Jsonb *request,
		  IdemRecord *record, int *stats)
{
	IdemStore  *store;
	LOCKTAG		tag;
	uint64		hash;
	IdemClaim  *claim;
	IdemClaimStatus status;

	store = idem_store_open(options->store, ACL_INSERT | ACL_SELECT,
							RowExclusiveLock);
	*stats = idem_stats_find(store->relid);
	hash = idem_key_hash(store->relid, key);
	idem_key_locktag(&tag, hash);

	claim = idem_pending_find(store->relid, key, hash);
	if (claim != NULL && claim->status.state == CLAIM_HELD)
	{
		memset(record, 0, sizeof(IdemRecord));
		return ANSWER_HELD;
	}
	if (claim != NULL && claim->status.state == CLAIM_COMPLETED)
	{
		idem_record_find(&store, key, record);
		if (record->found && record->own)
			return idem_judge(record, request);
	}

	switch (idem_key_lock_and_find(&store, key, &tag, options->deadline, true,
								   record))
	{
		case KEY_NOT_LOCKED:
			return ANSWER_IN_PROGRESS;
		case KEY_ANSWERED:
			if (record->snapshot_differs)
				idem_raise_conflict(store->relid, key);
			idem_record_make_durable(record);
			return idem_judge(record, request);
		case KEY_LOCKED:
			break;
	}
	if (record->snapshot_differs)
		idem_raise_conflict(store->relid, key);

	if (record->found)
	{
		IdemAnswer	answer = idem_judge(record, request);

		if (answer != ANSWER_CLAIMED)
		{
			idem_key_unlock(&tag);
			idem_record_make_durable(record);
			return answer;
		}
	}
	else if (options->has_first_sent &&
			 idem_may_have_expired(store->relid, options->first_sent))
	{
		idem_key_unlock(&tag);
		return ANSWER_TOO_LATE;
	}

	claim = idem_pending_add(store->relid, key, hash);
	status = claim->status;
	status.state = CLAIM_HELD;
	status.claimed_at = GetCurrentTimestamp();
	status.has_fingerprint = request != NULL;
	if (request != NULL)
		idem_fingerprint_compute(request, &status.fingerprint);
	status.replaces = record->found;
	status.has_row = false;
	if (idem_pending_locks() < max_locks_per_xact / 2)
		status.locked = true;
	else
	{
		make_good(store, key, record, &status);
		idem_key_unlock(&tag);
	}
	if (*stats != 0)
	{
		claim->stats = *stats;
		status.tally.claims++;
	}
	idem_pending_set(claim, &status);
	if (idem_track && claim->activity == 0)
		claim->activity = idem_activity_hold(store->relid, key,
											 status.claimed_at);
	return ANSWER_CLAIMED;
}

/*
 * Claim "key"; returns an IdemAnswer.  Never raises an error for the state of
 * the key, except 40001.
 *
 * On ANSWER_CLAIMED the key's lock is held to the end of the (sub)transaction
 * (or an uncommitted row stands for it); on any other answer this call holds
 * nothing, and *record is what it was read from.
 */
int
idem_claim_key(const IdemClaimOptions *options, text *key, Jsonb *request,
			   IdemRecord *record)
{
	int			stats;
	IdemAnswer	answer = claim_key(options, key, request, record, &stats);

	idem_stats_answer(stats, options->store, key, answer);
	return answer;
}

/*
 * The claim of "key" that this transaction holds, or error ID005.
 */
static IdemClaim *
held_claim(Oid store, text *key)
{
	IdemClaim  *claim = idem_pending_find(store, key,
										  idem_key_hash(store, key));

	if (claim == NULL || claim->status.state != CLAIM_HELD)
	{
		idem_raise_not_claimed(store, key,
							   claim != NULL &&
							   claim->status.state == CLAIM_COMPLETED ?
							   "operation is already completed in this transaction" :
							   "operation is not claimed by this transaction");
		pg_unreachable();
	}
	if (!claim->status.has_row)
	{
		LOCKTAG		tag;

		idem_key_locktag(&tag, claim->hash);
		if (!idem_lock_held(&tag, ExclusiveLock))
			elog(ERROR, "lost the lock of idempotency key \"%s\"",
				 text_to_cstring(key));
	}
	return claim;
}

/*
 * Put a completion in the place of the "released" record that the claim has
 * found, or has made.  One that was found can have been expired since.
 */
static void
complete_released(IdemStore *store, text *key, IdemClaim *claim,
				  IdemRecord *written)
{
	IdemRecord	old;
	LOCKTAG		tag;

	/*
	 * A claim made good early does without the key's lock, but while its row
	 * is replaced nobody may be in the middle of a look-up: a scan that has
	 * passed the new version's place and then finds the old one dead would
	 * report an absence.
	 */
	idem_key_locktag(&tag, claim->hash);
	if (claim->status.has_row && !claim->status.replaces &&
		idem_record_update_own(&store, key, &tag, claim->status.row_generation,
							   &claim->status.row_tid, written))
		return;

	/* Look again: rows can be written without the key's lock */
	for (;;)
	{
		idem_record_find(&store, key, &old);
		if (!TransactionIdIsValid(old.in_flux))
			break;
		(void) idem_xact_wait(old.in_flux, DT_NOEND);
		store = idem_store_refresh(store);
	}
	if (old.snapshot_differs || (old.found && old.status != IDEM_RELEASED) ||
		(claim->status.has_row && !(old.found && old.own)))
		idem_raise_conflict(store->relid, key);
	if (!old.found)
	{
		idem_record_insert(store, key, false, written);
		return;
	}
	idem_record_set(written, IDEM_ATTEMPTS,
					Int32GetDatum(idem_record_attempts(&old) + 1), false);

	if (claim->status.has_row && !idem_key_lock(&tag))
		(void) idem_key_lock_wait(&tag, DT_NOEND);
	idem_record_replace(store, key, &old, written);
	if (claim->status.has_row)
		idem_key_unlock(&tag);
}

/*
 * Write the completion of a key that this transaction has claimed; "just now"
 * means that nothing else was done since.  *written is the record as stored.
 */
void
idem_complete_claim(Oid storeid, text *key, Datum result, bool isnull,
					bool just_now, IdemRecord *written)
{
	IdemStore  *store = idem_store_open(storeid, ACL_INSERT | ACL_SELECT,
										RowExclusiveLock);
	IdemClaim  *claim = held_claim(storeid, key);
	IdemClaimStatus status = claim->status;

	idem_record_init(written, key, IDEM_COMPLETED, status.claimed_at);
	idem_record_set(written, IDEM_ATTEMPTS, Int32GetDatum(1), false);
	idem_record_set(written, IDEM_FINGERPRINT,
					UUIDPGetDatum(&status.fingerprint),
					!status.has_fingerprint);
	idem_record_set(written, IDEM_RESULT, result, isnull);

	if (status.replaces || status.has_row)
		complete_released(store, key, claim, written);
	else
		idem_record_insert(store, key, !just_now, written);

	status.state = CLAIM_COMPLETED;
	if (status.tally.claims > status.tally.executed + status.tally.released)
		status.tally.executed++;
	idem_pending_set(claim, &status);
}

/*
 * Find the record of a key that this transaction has completed; false if it
 * has not.
 */
bool
idem_find_own_completion(Oid storeid, text *key, IdemRecord *record)
{
	IdemStore  *store = idem_store_open(storeid, ACL_INSERT | ACL_SELECT,
										RowExclusiveLock);

	idem_record_find(&store, key, record);
	return record->found && record->own && record->status == IDEM_COMPLETED;
}

/*
 * Give up a claim of this transaction; false if it holds none.  The key's
 * lock stays to the end of the (sub)transaction, since a savepoint can still
 * take the release back.
 */
bool
idem_release_claim(Oid store, text *key)
{
	IdemClaim  *claim = idem_pending_find(store, key,
										  idem_key_hash(store, key));
	IdemClaimStatus status;

	(void) idem_store_open(store, ACL_INSERT | ACL_SELECT, RowExclusiveLock);
	if (claim == NULL || claim->status.state != CLAIM_HELD)
		return false;
	status = claim->status;
	status.state = CLAIM_NONE;
	status.has_row = false;
	if (status.tally.claims > status.tally.executed + status.tally.released)
		status.tally.released++;
	idem_pending_set(claim, &status);
	return true;
}

/*
 * Delete the record of a key, wherever it is; false if there is none.  Waits
 * for the key as a claim does, up to idem.wait_timeout.
 */
bool
idem_forget_key(Oid storeid, text *key)
{
	IdemStore  *store = idem_store_open(storeid, ACL_DELETE,
										RowExclusiveLock);
	uint64		hash = idem_key_hash(store->relid, key);
	IdemClaim  *claim = idem_pending_find(store->relid, key, hash);
	IdemRecord	record;
	LOCKTAG		tag;

	if (claim != NULL && claim->status.state == CLAIM_HELD)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("cannot forget a key that this transaction has claimed"),
				 errdetail("The key is \"%s\" in store %s.",
						   text_to_cstring(key), idem_store_name(storeid)),
				 errhint("Call idem_release() to give the claim up.")));

	idem_key_locktag(&tag, hash);
	if (idem_key_lock_and_find(&store, key, &tag, idem_deadline_default(),
							   false, &record) == KEY_NOT_LOCKED)
		idem_raise_answer(ANSWER_IN_PROGRESS, storeid, key, &record);
	if (record.snapshot_differs)
		idem_raise_conflict(storeid, key);
	if (!record.found)
	{
		idem_key_unlock(&tag);
		return false;
	}

	idem_record_delete(&store, key, &record, 0);

	/* From here on, the row whose deletion is not committed stands for it */
	idem_key_unlock(&tag);
	if (claim != NULL)
	{
		IdemClaimStatus status = claim->status;

		status.state = CLAIM_NONE;
		idem_pending_set(claim, &status);
	}
	return true;
}
