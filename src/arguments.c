/*-------------------------------------------------------------------------
 *
 * arguments.c
 *	  Arguments and results that many SQL functions share.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"
#include "utils/typcache.h"

#include "answer.h"
#include "arguments.h"
#include "claim.h"
#include "compat.h"
#include "idem.h"
#include "key.h"
#include "record.h"
#include "store.h"

/*
 * A key that was checked: NULL is 22004, a bad one 22023.
 */
text *
idem_check_key_datum(Datum key, bool isnull)
{
	text	   *result;

	if (isnull)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("idempotency key must not be null"),
				 errhint("Build keys from parts that are always there, for example with idem_key().")));
	result = DatumGetTextPP(key);
	idem_check_key(result);
	return result;
}

text *
idem_arg_key(FunctionCallInfo fcinfo, int n)
{
	return idem_check_key_datum(PG_GETARG_DATUM(n), PG_ARGISNULL(n));
}

Oid
idem_arg_store(FunctionCallInfo fcinfo, int n)
{
	if (PG_ARGISNULL(n))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("store must not be null"),
				 errhint("Leave the argument out to use idem_completions.")));
	return PG_GETARG_OID(n);
}

/*
 * The end of a wait that begins now: an interval, or NULL for the setting.
 * A month counts as 30 days.
 */
TimestampTz
idem_arg_deadline(FunctionCallInfo fcinfo, int n)
{
	Interval   *wait;
	TimestampTz now;
	double		usecs;

	if (PG_ARGISNULL(n))
		return idem_deadline_default();

	wait = PG_GETARG_INTERVAL_P(n);
	usecs = (double) wait->time +
		((double) wait->month * DAYS_PER_MONTH + wait->day) * USECS_PER_DAY;
	if (usecs < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("wait must not be negative"),
				 errhint("Pass an interval of 0 not to wait, or NULL to wait as long as \"idem.wait_timeout\" says.")));
	now = GetCurrentTimestamp();
	if (usecs >= (double) (END_TIMESTAMP - now))
		return DT_NOEND;
	return now + (int64) usecs;
}

/*
 * The columns of an idem_outcome.  "answer" is an IdemAnswer; "claimed" says
 * whether the caller is to do the work (or, of idem_run, whether it ran).
 */
void
idem_outcome_values(bool claimed, int answer, const IdemRecord *record,
					Datum *values, bool *nulls)
{
	static const int columns[IDEM_OUTCOME_COLUMNS] = {
		-1, -1, IDEM_RESULT, IDEM_COMPLETED_AT, IDEM_TOKEN, IDEM_LEASE_UNTIL,
		IDEM_CHECKPOINT
	};

	for (int i = 2; i < IDEM_OUTCOME_COLUMNS; i++)
	{
		bool		shown;

		switch (columns[i])
		{
			case IDEM_RESULT:
			case IDEM_COMPLETED_AT:
				shown = answer == ANSWER_COMPLETED || answer == ANSWER_SKIPPED;
				break;
			case IDEM_LEASE_UNTIL:
				shown = answer == ANSWER_IN_PROGRESS ||
					answer == ANSWER_UNCERTAIN;
				break;
			default:
				shown = answer == ANSWER_UNCERTAIN;
				break;
		}
		shown = shown && record->found && !record->nulls[columns[i]];
		nulls[i] = !shown;
		values[i] = shown ? record->values[columns[i]] : (Datum) 0;
	}
	values[0] = BoolGetDatum(claimed);
	values[1] = CStringGetTextDatum(idem_answer_name(answer));
	nulls[0] = nulls[1] = false;
}

Datum
idem_outcome_datum(FunctionCallInfo fcinfo, bool claimed, int answer,
				   const IdemRecord *record)
{
	Oid			type = get_fn_expr_rettype(fcinfo->flinfo);
	TupleDesc	desc;
	Datum		values[IDEM_OUTCOME_COLUMNS];
	bool		nulls[IDEM_OUTCOME_COLUMNS];
	HeapTuple	tuple;

	if (!OidIsValid(type))
		type = get_func_rettype(fcinfo->flinfo->fn_oid);
	desc = lookup_rowtype_tupdesc(type, -1);
	if (desc->natts != IDEM_OUTCOME_COLUMNS)
		elog(ERROR, "type idem_outcome has %d columns instead of %d",
			 desc->natts, IDEM_OUTCOME_COLUMNS);
	idem_outcome_values(claimed, answer, record, values, nulls);
	tuple = heap_form_tuple(desc, values, nulls);
	ReleaseTupleDesc(desc);
	return HeapTupleGetDatum(tuple);
}
