/*-------------------------------------------------------------------------
 *
 * answer.c
 *	  What a claim is answered, and the errors that stand for some answers.
 *
 * Every error about a key is made here: with an SQLSTATE by which callers
 * tell the cases apart, key and store in the DETAIL, and a HINT that says
 * what to do.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "answer.h"
#include "bookkeeping.h"
#include "fingerprint.h"
#include "idem.h"
#include "record.h"
#include "store.h"

const char *
idem_answer_name(IdemAnswer answer)
{
	switch (answer)
	{
		case ANSWER_CLAIMED:
			return "claimed";
		case ANSWER_HELD:
			return "held";
		case ANSWER_COMPLETED:
			return "completed";
		case ANSWER_SKIPPED:
			return "skipped";
		case ANSWER_IN_PROGRESS:
			return "in_progress";
		case ANSWER_KEY_REUSED:
			return "key_reused";
		case ANSWER_UNCERTAIN:
			return "uncertain";
		case ANSWER_TOO_LATE:
			return "too_late";
		case ANSWER_LEASED:
			return "leased";
		case ANSWER_RELEASED:
			return "released";
	}
	pg_unreachable();
}

/*
 * Raise the error that stands for an answer, if it is one that idem_claim()
 * raises.  "record" may be empty.
 */
void
idem_raise_answer(IdemAnswer answer, Oid store, text *key,
				  const IdemRecord *record)
{
	char	   *name = text_to_cstring(key);

	switch (answer)
	{
		case ANSWER_IN_PROGRESS:
			if (record->found && record->status == IDEM_LEASED &&
				!record->nulls[IDEM_LEASE_UNTIL])
			{
				TimestampTz until;

				until = DatumGetTimestampTz(record->values[IDEM_LEASE_UNTIL]);
				ereport(ERROR,
						(errcode(ERRCODE_IDEM_IN_PROGRESS),
						 errmsg("operation is in progress under a lease"),
						 errdetail("The lease of key \"%s\" in store %s ends at %s.",
								   name, idem_store_name(store),
								   timestamptz_to_str(until)),
						 errhint("Retry after the lease has ended.")));
			}
			ereport(ERROR,
					(errcode(ERRCODE_IDEM_IN_PROGRESS),
					 errmsg("operation is still in progress in another transaction"),
					 errdetail("The key is \"%s\" in store %s.",
							   name, idem_store_name(store)),
					 errhint("Retry later, or wait longer: see the argument \"wait\" and the setting \"idem.wait_timeout\".")));
			break;
		case ANSWER_KEY_REUSED:
			ereport(ERROR,
					(errcode(ERRCODE_IDEM_KEY_REUSED),
					 errmsg("idempotency key was used before with a different request"),
					 errdetail("The key is \"%s\" in store %s.",
							   name, idem_store_name(store)),
					 errhint("A key names one intended operation; use a new key for a new one, and leave volatile fields out of the request.")));
			break;
		case ANSWER_UNCERTAIN:
			ereport(ERROR,
					(errcode(ERRCODE_IDEM_UNCERTAIN),
					 errmsg("outcome of the operation is uncertain: its lease ran out"),
					 errdetail("The key is \"%s\" in store %s.",
							   name, idem_store_name(store)),
					 errhint("Find out whether the effect happened, then call idem_resolve().")));
			break;
		case ANSWER_TOO_LATE:
			ereport(ERROR,
					(errcode(ERRCODE_IDEM_TOO_LATE),
					 errmsg("operation was first sent before what the store still knows"),
					 errdetail("The key is \"%s\" in store %s.",
							   name, idem_store_name(store)),
					 errhint("Its record may have expired, so running it could be a second run; find out whether it was done.")));
			break;
		default:
			break;
	}
	pfree(name);
}

/*
 * Raise ID005.
 */
void
idem_raise_not_claimed(Oid store, text *key, const char *why)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEM_NOT_CLAIMED),
			 errmsg_internal("%s", why),
			 errdetail("The key is \"%s\" in store %s.",
					   text_to_cstring(key), idem_store_name(store)),
			 errhint("A claim is completed once, in the transaction that made it; a lease in a later one, with its latest token.")));
}

/*
 * Raise ID005 for a lease that was completed with another result.
 */
void
idem_raise_other_result(Oid store, text *key, const IdemRecord *record)
{
	char	   *result = "NULL";
	int			len;

	if (!record->nulls[IDEM_RESULT])
		result = TextDatumGetCString(record->values[IDEM_RESULT]);
	len = pg_mbcliplen(result, strlen(result), 1000);
	ereport(ERROR,
			(errcode(ERRCODE_IDEM_NOT_CLAIMED),
			 errmsg("lease was completed with another result"),
			 errdetail("Stored for key \"%s\" in store %s: %.*s%s.",
					   text_to_cstring(key), idem_store_name(store), len,
					   result, result[len] != '\0' ? "..." : ""),
			 errhint("Use what is stored (see idem_lookup()); it was the first.")));
}

/*
 * Somebody else wrote a record of a key that this transaction claims.
 */
void
idem_raise_conflict(Oid store, text *key)
{
	ereport(ERROR,
			(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
			 errmsg("could not serialize access to an idempotency key due to concurrent change"),
			 errdetail("The key is \"%s\" in store %s.",
					   text_to_cstring(key), idem_store_name(store)),
			 errhint("Roll back and retry the transaction.")));
}

/*
 * What a record that stands means to somebody who claims its key.
 */
IdemAnswer
idem_judge(const IdemRecord *record, Jsonb *request)
{
	Datum		lease_until = record->values[IDEM_LEASE_UNTIL];
	Datum		fingerprint = record->values[IDEM_FINGERPRINT];

	if (request != NULL && !record->nulls[IDEM_FINGERPRINT] &&
		(record->status == IDEM_COMPLETED || record->status == IDEM_LEASED) &&
		!idem_fingerprint_matches(DatumGetUUIDP(fingerprint), request))
		return ANSWER_KEY_REUSED;

	switch (record->status)
	{
		case IDEM_COMPLETED:
			return ANSWER_COMPLETED;
		case IDEM_SKIPPED:
			return ANSWER_SKIPPED;
		case IDEM_LEASED:
			if (!record->nulls[IDEM_LEASE_UNTIL] &&
				DatumGetTimestampTz(lease_until) > GetCurrentTimestamp())
				return ANSWER_IN_PROGRESS;
			return ANSWER_UNCERTAIN;
		default:
			Assert(record->status == IDEM_RELEASED);
			return ANSWER_CLAIMED;
	}
}

/*
 * Could the record of an operation that was first sent then have expired?
 * To be asked after the look-up: an emptying in between has moved the
 * watermark before the records were gone.
 */
bool
idem_may_have_expired(Oid store, TimestampTz first_sent)
{
	IdemStoreState state;
	TimestampTz known_since;

	idem_state_read(store, &state);
	known_since = state.watermark;
	if (state.expires)
		known_since = Max(known_since,
						  GetCurrentTimestamp() -
						  state.retention * USECS_PER_SEC);
	return first_sent < known_since;
}
