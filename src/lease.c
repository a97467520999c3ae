/*-------------------------------------------------------------------------
 *
 * lease.c
 *	  Effects outside the database: committed, timed claims.
 *
 * A lease is a record with status "leased", committed before the effect is
 * started, so it must be written in a transaction of its own: completing it
 * in the transaction that took it is refused (see CLAIM_LEASED in pending.c).
 * What its holder acts on, the lease, its end, its checkpoint, is committed
 * durably whatever the session has set.
 *
 * The token of a lease comes from one sequence of the database, so it is
 * larger than that of every earlier lease.  Whoever changes a lease names
 * its token; after a take-over the old token fits nothing any more.
 *
 * Times: one clock, the server's, as of the moment of the call, not of the
 * transaction's start.  claimed_at is when the first lease of the operation
 * was taken, which is what retry_window counts from; it survives take-overs,
 * and starts anew when the operation was released.
 *
 * Every function here locks the key as a claim does, looks the record up in
 * all generations, writes its successor (which moves it to the current one),
 * and lets go of the lock: the uncommitted row is what others wait for then.
 * The lock has to be held during the write only, so that nobody is in the
 * middle of a look-up when the row changes its place.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog.h"
#include "catalog/pg_authid.h"
#include "commands/dbcommands.h"
#include "commands/sequence.h"
#include "fmgr.h"
#include "lib/stringinfo.h"
#include "libpq/libpq-be.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/guc.h"
#include "utils/json.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "answer.h"
#include "bookkeeping.h"
#include "claim.h"
#include "compat.h"
#include "fingerprint.h"
#include "key.h"
#include "lease.h"
#include "pending.h"
#include "record.h"
#include "stats.h"
#include "store.h"
#include "wait.h"
#include "write.h"

#define LEASE_PRIVILEGES	(ACL_INSERT | ACL_SELECT | ACL_UPDATE)
#define TOKEN_SEQUENCE		"idem_token_seq"

/* How far the sequence is moved past a token it does not know of */
#define TOKEN_JUMP			(INT64CONST(1) << 20)

/* Each timeline has its own range of tokens */
#define TIMELINE_SHIFT		40

/*
 * No record has a larger token, or whoever plants one could use up those of
 * the whole database.
 */
#define MAX_TOKEN			(INT64CONST(1) << 62)

/* A key, locked and looked up */
typedef struct LockedKey
{
	Oid			relid;			/* of the store */
	IdemStore  *store;			/* not to be used after a write */
	LOCKTAG		tag;
	IdemClaim  *claim;			/* of this transaction, or NULL */
	IdemRecord	record;
} LockedKey;


static void
open_key(Oid store, text *key, LockedKey *lk)
{
	uint64		hash;

	lk->relid = store;
	lk->store = idem_store_open(store, LEASE_PRIVILEGES, RowExclusiveLock);
	hash = idem_key_hash(store, key);
	idem_key_locktag(&lk->tag, hash);
	lk->claim = idem_pending_find(store, key, hash);
}

/*
 * Lock a key whose record is to be changed, waiting as long as
 * idem.wait_timeout says (ID002).
 */
static void
lock_key(Oid store, text *key, LockedKey *lk)
{
	open_key(store, key, lk);
	if (idem_key_lock_and_find(&lk->store, key, &lk->tag,
							   idem_deadline_default(), false,
							   &lk->record) == KEY_NOT_LOCKED)
	{
		lk->record.found = false;
		idem_raise_answer(ANSWER_IN_PROGRESS, store, key, &lk->record);
	}
	if (lk->record.snapshot_differs)
		idem_raise_conflict(store, key);
}

/*
 * Remember what this change counts for once the transaction commits.
 */
static void
tally(LockedKey *lk, text *key, IdemCounter counter)
{
	Oid			store = lk->relid;
	int			stats = idem_stats_find(store);
	IdemClaimStatus status;

	if (stats == 0)
		return;
	if (lk->claim == NULL)
		lk->claim = idem_pending_add(store, key, idem_key_hash(store, key));
	lk->claim->stats = stats;
	status = lk->claim->status;
	switch (counter)
	{
		case COUNT_LEASES:
			status.tally.claims++;
			status.tally.leases++;
			break;
		case COUNT_RETRIED:
			status.tally.retried++;
			break;
		case COUNT_EXECUTED:
			status.tally.executed++;
			break;
		case COUNT_RELEASED:
			status.tally.released++;
			break;
		default:
			Assert(counter == COUNT_RESOLVED);
			status.tally.resolved++;
			break;
	}
	idem_pending_set(lk->claim, &status);
}

/*
 * Write the successor of the record that was found, and let go of the key.
 */
static void
write_and_unlock(LockedKey *lk, text *key, IdemRecord *successor)
{
	if (lk->record.found)
		idem_record_replace(lk->store, key, &lk->record, successor);
	else
		idem_record_insert(lk->store, key, false, successor);
	idem_key_unlock(&lk->tag);
}

static bool
has_token(const IdemRecord *record, int64 token)
{
	return record->found && !record->nulls[IDEM_TOKEN] &&
		DatumGetInt64(record->values[IDEM_TOKEN]) == token;
}

static bool
holds_lease(const IdemRecord *record, int64 token)
{
	return record->status == IDEM_LEASED && has_token(record, token);
}

/*
 * Lock a key whose lease must be held with "token", and have been committed
 * by now; otherwise ID005.
 */
static void
lock_lease(Oid store, text *key, int64 token, LockedKey *lk)
{
	lock_key(store, key, lk);
	if (!holds_lease(&lk->record, token))
		idem_raise_not_claimed(store, key,
							   "no lease of the operation has this token");
	if (lk->claim != NULL && lk->claim->status.state == CLAIM_LEASED)
		idem_raise_not_claimed(store, key,
							   "lease is not committed yet");
}

/*
 * The next token, larger than "previous".  The sequence normally is already;
 * only records that came from another database (by logical replication, say)
 * can be ahead of it.
 */
static int64
next_token(int64 previous)
{
	Oid			schema = idem_extension_schema();
	Oid			sequence = get_relname_relid(TOKEN_SEQUENCE, schema);
	int64		token = nextval_internal(sequence, false);

	if (token <= previous && previous > MAX_TOKEN)
		ereport(ERROR,
				(errcode(ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE),
				 errmsg("token of the record is out of range"),
				 errhint("It was written by hand; correct it, or call idem_forget().")));

	/*
	 * A failover can lose the latest tokens together with their leases; who
	 * has one must not hold what is leased after it.
	 */
	previous = Max(previous,
				   ((int64) GetWALInsertionTimeLine() - 1) << TIMELINE_SHIFT);
	if (token <= previous)
	{
		/* Movers of the sequence take turns, and never move it back */
		(void) idem_state_lock(sequence, true);
		token = nextval_internal(sequence, false);
		if (token <= previous)
		{
			Oid			save_userid;
			int			save_sec_context;

			GetUserIdAndSecContext(&save_userid, &save_sec_context);
			SetUserIdAndSecContext(BOOTSTRAP_SUPERUSERID,
								   save_sec_context |
								   SECURITY_RESTRICTED_OPERATION);
			(void) DirectFunctionCall2(setval_oid,
									   ObjectIdGetDatum(sequence),
									   Int64GetDatum(previous + TOKEN_JUMP));
			SetUserIdAndSecContext(save_userid, save_sec_context);
			token = nextval_internal(sequence, false);
		}
	}
	return token;
}

/*
 * Who takes the lease: a JSON object, as the view idem_uncertain takes it
 * apart.
 */
static text *
holder(TimestampTz now)
{
	StringInfoData buf;
	char	   *user;
	const char *address = "";
	int64		since = now +
		(POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * USECS_PER_DAY;

	if (MyProcPort != NULL && MyProcPort->remote_host != NULL)
		address = MyProcPort->remote_host;

	/* names of roles come from any database, in its encoding */
	user = GetUserNameFromId(GetSessionUserId(), false);
	if (!pg_verify_mbstr(GetDatabaseEncoding(), user, strlen(user), true))
		for (char *p = user; *p != '\0'; p++)
			if (IS_HIGHBIT_SET(*p))
				*p = '?';

	initStringInfo(&buf);
	appendStringInfoString(&buf, "{\"user\": ");
	escape_json(&buf, user);
	appendStringInfoString(&buf, ", \"application\": ");
	escape_json(&buf, application_name ? application_name : "");
	appendStringInfoString(&buf, ", \"address\": ");
	escape_json(&buf, address);
	appendStringInfo(&buf, ", \"pid\": %d, \"since\": " INT64_FORMAT "}",
					 MyProcPid, since);
	return cstring_to_text_with_len(buf.data, buf.len);
}

/*
 * Take the lease: write the record with a new token.
 */
static void
take_lease(LockedKey *lk, text *key, const IdemLeaseRequest *lease,
		   IdemRecord *taken)
{
	IdemRecord *old = &lk->record;
	TimestampTz now = GetCurrentTimestamp();
	IdemClaimStatus status;
	int64		previous = 0;
	Oid			store = lk->relid;
	pg_uuid_t  *fingerprint;

	if (old->found && !old->nulls[IDEM_TOKEN])
		previous = DatumGetInt64(old->values[IDEM_TOKEN]);
	if (old->found && old->status == IDEM_LEASED)
		idem_record_copy(taken, old);
	else
	{
		idem_record_init(taken, key, IDEM_LEASED, now);
		if (old->found)
			idem_record_set(taken, IDEM_CHECKPOINT,
							old->values[IDEM_CHECKPOINT],
							old->nulls[IDEM_CHECKPOINT]);
	}
	taken->own = true;
	idem_record_set(taken, IDEM_COMPLETED_AT, 0, true);
	idem_record_set(taken, IDEM_ATTEMPTS,
					Int32GetDatum(idem_record_attempts(old) + 1), false);
	idem_record_set(taken, IDEM_TOKEN, Int64GetDatum(next_token(previous)),
					false);
	idem_record_set(taken, IDEM_LEASE_UNTIL,
					TimestampTzGetDatum(now + lease->duration), false);
	idem_record_set(taken, IDEM_CLAIMED_BY, PointerGetDatum(holder(now)),
					false);
	if (lease->request != NULL)
	{
		fingerprint = palloc(sizeof(pg_uuid_t));
		idem_fingerprint_compute(lease->request, fingerprint);
		idem_record_set(taken, IDEM_FINGERPRINT, UUIDPGetDatum(fingerprint),
						false);
	}
	write_and_unlock(lk, key, taken);
	idem_pending_require_durable();

	if (lk->claim == NULL)
		lk->claim = idem_pending_add(store, key, idem_key_hash(store, key));
	status = lk->claim->status;
	status.state = CLAIM_LEASED;
	idem_pending_set(lk->claim, &status);
	tally(lk, key, COUNT_LEASES);
	if (old->found && old->status == IDEM_LEASED)
		tally(lk, key, COUNT_RETRIED);
}

/*
 * An uncertain operation, and "skip": it is given up for good.
 */
static void
skip(LockedKey *lk, text *key)
{
	IdemRecord	skipped;

	idem_record_copy(&skipped, &lk->record);
	idem_record_set_status(&skipped, IDEM_SKIPPED);
	idem_record_set(&skipped, IDEM_COMPLETED_AT,
					TimestampTzGetDatum(GetCurrentTimestamp()), false);
	write_and_unlock(lk, key, &skipped);
	lk->record = skipped;
}

/*
 * Is the first lease of the operation recent enough for a retry?
 */
static bool
within_retry_window(const IdemRecord *record, const IdemLeaseRequest *lease)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz first;

	if (lease->retry_window == PG_INT64_MAX)
		return true;
	if (record->nulls[IDEM_CLAIMED_AT])
		return false;
	first = DatumGetTimestampTz(record->values[IDEM_CLAIMED_AT]);
	return !TIMESTAMP_NOT_FINITE(first) && first <= now &&
		now - first < lease->retry_window;
}

/*
 * Lease a key for idem_lease_key(), which counts the answer at *stats.
 */
static IdemAnswer
lease_key(Oid store, text *key, const IdemLeaseRequest *lease,
		  TimestampTz deadline, IdemRecord *record, int *stats)
{
	LockedKey	lk;
	IdemAnswer	answer;

	open_key(store, key, &lk);
	*stats = idem_stats_find(store);
	if (lk.claim != NULL && lk.claim->status.state == CLAIM_HELD)
	{
		memset(record, 0, sizeof(IdemRecord));
		return ANSWER_HELD;
	}

	switch (idem_key_lock_and_find(&lk.store, key, &lk.tag, deadline, true,
								   &lk.record))
	{
		case KEY_NOT_LOCKED:
			*record = lk.record;
			return ANSWER_IN_PROGRESS;
		case KEY_ANSWERED:
			if (lk.record.snapshot_differs)
				idem_raise_conflict(store, key);
			idem_record_make_durable(&lk.record);
			*record = lk.record;
			return idem_judge(record, lease->request);
		case KEY_LOCKED:
			break;
	}
	if (lk.record.snapshot_differs)
		idem_raise_conflict(store, key);

	if (!lk.record.found)
		answer = lease->has_first_sent &&
			idem_may_have_expired(store, lease->first_sent) ?
			ANSWER_TOO_LATE : ANSWER_CLAIMED;
	else
		answer = idem_judge(&lk.record, lease->request);

	if (answer == ANSWER_CLAIMED ||
		(answer == ANSWER_UNCERTAIN && lease->policy == POLICY_RETRY &&
		 within_retry_window(&lk.record, lease)))
	{
		take_lease(&lk, key, lease, record);
		return ANSWER_LEASED;
	}
	if (answer == ANSWER_UNCERTAIN && lease->policy == POLICY_SKIP)
	{
		skip(&lk, key);
		answer = ANSWER_SKIPPED;
	}
	else
	{
		idem_key_unlock(&lk.tag);
		if (lk.record.found)
			idem_record_make_durable(&lk.record);
	}
	*record = lk.record;
	return answer;
}

/*
 * Lease "key"; returns an IdemAnswer.  Never raises an error for the state of
 * the key, except 40001.
 */
int
idem_lease_key(Oid store, text *key, const IdemLeaseRequest *lease,
			   TimestampTz deadline, IdemRecord *record)
{
	int			stats;
	IdemAnswer	answer = lease_key(store, key, lease, deadline, record,
								   &stats);

	idem_stats_answer(stats, store, key, answer);
	return answer;
}

/*
 * Record progress under a lease.
 */
void
idem_checkpoint_lease(Oid store, text *key, int64 token, Datum checkpoint,
					  bool isnull)
{
	LockedKey	lk;
	IdemRecord	changed;

	lock_lease(store, key, token, &lk);
	idem_record_copy(&changed, &lk.record);
	idem_record_set(&changed, IDEM_CHECKPOINT, checkpoint, isnull);
	write_and_unlock(&lk, key, &changed);
	idem_pending_require_durable();
}

/*
 * Let a lease end "duration" microseconds from now; returns when.  One that
 * has run out may be extended as long as nobody took it over.
 */
TimestampTz
idem_extend_lease(Oid store, text *key, int64 token, int64 duration)
{
	LockedKey	lk;
	IdemRecord	changed;
	TimestampTz until;

	lock_lease(store, key, token, &lk);
	until = GetCurrentTimestamp() + duration;
	idem_record_copy(&changed, &lk.record);
	idem_record_set(&changed, IDEM_LEASE_UNTIL, TimestampTzGetDatum(until),
					false);
	write_and_unlock(&lk, key, &changed);
	idem_pending_require_durable();
	return until;
}

static bool
same_result(const IdemRecord *record, Datum result, bool isnull)
{
	text	   *stored;
	text	   *given;

	if (record->nulls[IDEM_RESULT] || isnull)
		return record->nulls[IDEM_RESULT] && isnull;
	stored = DatumGetTextPP(record->values[IDEM_RESULT]);
	given = DatumGetTextPP(result);
	return VARSIZE_ANY_EXHDR(stored) == VARSIZE_ANY_EXHDR(given) &&
		memcmp(VARDATA_ANY(stored), VARDATA_ANY(given),
			   VARSIZE_ANY_EXHDR(stored)) == 0;
}

/*
 * Turn the record that was found into a completion.
 */
static void
complete_and_unlock(LockedKey *lk, text *key, Datum result, bool isnull,
					IdemRecord *written)
{
	idem_record_copy(written, &lk->record);
	idem_record_set_status(written, IDEM_COMPLETED);
	idem_record_set(written, IDEM_COMPLETED_AT,
					TimestampTzGetDatum(GetCurrentTimestamp()), false);
	idem_record_set(written, IDEM_LEASE_UNTIL, 0, true);
	idem_record_set(written, IDEM_RESULT, result, isnull);
	write_and_unlock(lk, key, written);
}

/*
 * Complete a lease.  Repeated with the same token and result (because the
 * acknowledgement was lost) it answers the same.
 */
void
idem_complete_lease(Oid store, text *key, int64 token, Datum result,
					bool isnull, IdemRecord *written)
{
	LockedKey	lk;

	lock_key(store, key, &lk);
	if (lk.record.status == IDEM_COMPLETED && has_token(&lk.record, token))
	{
		if (!same_result(&lk.record, result, isnull))
			idem_raise_other_result(store, key, &lk.record);
		idem_key_unlock(&lk.tag);
		idem_record_make_durable(&lk.record);
		*written = lk.record;
		return;
	}
	if (!holds_lease(&lk.record, token))
		idem_raise_not_claimed(store, key,
							   "no lease of the operation has this token");
	if (lk.claim != NULL && lk.claim->status.state == CLAIM_LEASED)
		idem_raise_not_claimed(store, key, "lease is not committed yet");
	complete_and_unlock(&lk, key, result, isnull, written);
	tally(&lk, key, COUNT_EXECUTED);
}

/*
 * Turn the record that was found into a released one: the effect is known
 * not to have happened.
 */
static void
release_and_unlock(LockedKey *lk, text *key, IdemRecord *written)
{
	idem_record_copy(written, &lk->record);
	idem_record_set_status(written, IDEM_RELEASED);
	idem_record_set(written, IDEM_COMPLETED_AT,
					TimestampTzGetDatum(GetCurrentTimestamp()), false);
	idem_record_set(written, IDEM_LEASE_UNTIL, 0, true);
	idem_record_set(written, IDEM_FINGERPRINT, 0, true);
	write_and_unlock(lk, key, written);
}

/*
 * Give up a lease; false if it is not held with this token.
 */
bool
idem_release_lease(Oid store, text *key, int64 token)
{
	LockedKey	lk;
	IdemRecord	written;

	lock_key(store, key, &lk);
	if (!holds_lease(&lk.record, token))
	{
		idem_key_unlock(&lk.tag);
		return false;
	}
	release_and_unlock(&lk, key, &written);
	tally(&lk, key, COUNT_RELEASED);
	if (lk.claim != NULL && lk.claim->status.state == CLAIM_LEASED)
	{
		IdemClaimStatus status = lk.claim->status;

		status.state = CLAIM_NONE;
		idem_pending_set(lk.claim, &status);
	}
	return true;
}

/*
 * Decide an uncertain key: the effect happened, with this result, or not.
 * ID002 while the lease runs.
 */
void
idem_resolve_key(Oid store, text *key, bool happened, Datum result,
				 bool isnull, IdemRecord *written)
{
	LockedKey	lk;

	lock_key(store, key, &lk);
	if (!lk.record.found || lk.record.status != IDEM_LEASED)
		idem_raise_not_claimed(store, key, "operation is not uncertain");
	if (idem_judge(&lk.record, NULL) == ANSWER_IN_PROGRESS)
		idem_raise_answer(ANSWER_IN_PROGRESS, store, key, &lk.record);
	if (lk.claim != NULL && lk.claim->status.state == CLAIM_LEASED)
		idem_raise_not_claimed(store, key, "lease is not committed yet");

	if (happened)
		complete_and_unlock(&lk, key, result, isnull, written);
	else
		release_and_unlock(&lk, key, written);
	tally(&lk, key, COUNT_RESOLVED);
}
