/*-------------------------------------------------------------------------
 *
 * lease_functions.c
 *	  SQL functions for effects outside the database.
 *
 * Only arguments and results are handled here; what the functions do is in
 * lease.c.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/timestamp.h"

#include "answer.h"
#include "arguments.h"
#include "claim.h"
#include "compat.h"
#include "lease.h"
#include "record.h"
#include "result.h"

PG_FUNCTION_INFO_V1(idem_lease);
PG_FUNCTION_INFO_V1(idem_try_lease);
PG_FUNCTION_INFO_V1(idem_checkpoint);
PG_FUNCTION_INFO_V1(idem_extend);
PG_FUNCTION_INFO_V1(idem_resolve);
PG_FUNCTION_INFO_V1(idem_resolve_any);

/*
 * idem_lease and idem_try_lease(key text, request jsonb, lease interval,
 *		on_uncertain text, retry_window interval, first_sent timestamptz,
 *		store regclass) returns idem_outcome
 */
static Datum
lease(FunctionCallInfo fcinfo, const char *name, bool raise)
{
	text	   *key = idem_arg_key(fcinfo, 0);
	Oid			store = idem_arg_store(fcinfo, 6);
	IdemLeaseRequest req;
	char	   *policy;
	TimestampTz deadline;
	IdemRecord	record;
	IdemAnswer	answer;

	req.request = PG_ARGISNULL(1) ? NULL : PG_GETARG_JSONB_P(1);
	req.duration = idem_arg_lease(fcinfo, 2);
	policy = PG_ARGISNULL(3) ? "" : text_to_cstring(PG_GETARG_TEXT_PP(3));
	if (strcmp(policy, "reconcile") == 0)
		req.policy = POLICY_RECONCILE;
	else if (strcmp(policy, "retry") == 0)
		req.policy = POLICY_RETRY;
	else if (strcmp(policy, "skip") == 0)
		req.policy = POLICY_SKIP;
	else
		ereport(ERROR,
				(errcode(PG_ARGISNULL(3) ? ERRCODE_NULL_VALUE_NOT_ALLOWED :
						 ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("on_uncertain must be \"reconcile\", \"retry\" or \"skip\""),
				 errhint("\"retry\" can duplicate the effect, \"skip\" can lose it, \"reconcile\" leaves it to you.")));
	req.retry_window = PG_INT64_MAX;
	if (!PG_ARGISNULL(4))
		req.retry_window = idem_interval_usecs(PG_GETARG_INTERVAL_P(4),
											   "retry_window");
	req.has_first_sent = !PG_ARGISNULL(5);
	req.first_sent = req.has_first_sent ? PG_GETARG_TIMESTAMPTZ(5) : 0;

	idem_check_may_write(name);
	deadline = raise ? idem_deadline_default() : GetCurrentTimestamp();
	answer = idem_lease_key(store, key, &req, deadline, &record);
	if (raise)
		idem_raise_answer(answer, store, key, &record);
	PG_RETURN_DATUM(idem_outcome_datum(fcinfo, answer == ANSWER_LEASED, answer,
									   &record));
}

Datum
idem_lease(PG_FUNCTION_ARGS)
{
	return lease(fcinfo, "idem_lease()", true);
}

Datum
idem_try_lease(PG_FUNCTION_ARGS)
{
	return lease(fcinfo, "idem_try_lease()", false);
}

/*
 * idem_checkpoint(key text, token bigint, checkpoint jsonb, store regclass)
 *		returns jsonb
 */
Datum
idem_checkpoint(PG_FUNCTION_ARGS)
{
	text	   *key = idem_arg_key(fcinfo, 0);
	int64		token = idem_arg_token(fcinfo, 1);
	Oid			store = idem_arg_store(fcinfo, 3);
	Datum		checkpoint = PG_ARGISNULL(2) ? (Datum) 0 : PG_GETARG_DATUM(2);

	idem_check_may_write("idem_checkpoint()");
	idem_checkpoint_lease(store, key, token, checkpoint, PG_ARGISNULL(2));
	if (PG_ARGISNULL(2))
		PG_RETURN_NULL();
	PG_RETURN_DATUM(checkpoint);
}

/*
 * idem_extend(key text, token bigint, lease interval, store regclass)
 *		returns timestamptz
 */
Datum
idem_extend(PG_FUNCTION_ARGS)
{
	text	   *key = idem_arg_key(fcinfo, 0);
	Oid			store = idem_arg_store(fcinfo, 3);
	int64		token = idem_arg_token(fcinfo, 1);
	int64		duration = idem_arg_lease(fcinfo, 2);

	idem_check_may_write("idem_extend()");
	PG_RETURN_TIMESTAMPTZ(idem_extend_lease(store, key, token, duration));
}

/*
 * Decide an uncertain key.
 */
static Datum
resolve(FunctionCallInfo fcinfo, text *key, Oid store, Datum result,
		bool isnull)
{
	IdemRecord	written;

	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("happened must not be null"),
				 errhint("Pass true if the effect happened, false if it is known that it did not.")));
	if (!PG_GETARG_BOOL(1) && !isnull)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("an effect that did not happen has no result"),
				 errhint("Leave the result out, or pass true.")));

	idem_check_may_write("idem_resolve()");
	idem_resolve_key(store, key, PG_GETARG_BOOL(1), result, isnull, &written);
	PG_RETURN_DATUM(idem_completion_datum(fcinfo, &written));
}

/*
 * idem_resolve(key text, happened boolean, result text, store regclass)
 *		returns idem_completion
 */
Datum
idem_resolve(PG_FUNCTION_ARGS)
{
	text	   *key = idem_arg_key(fcinfo, 0);
	Oid			store = idem_arg_store(fcinfo, 3);
	bool		isnull = PG_ARGISNULL(2);
	Datum		result = (Datum) 0;

	if (!isnull)
		result = idem_result_from_text(PG_GETARG_TEXT_PP(2));
	return resolve(fcinfo, key, store, result, isnull);
}

/*
 * idem_resolve(key text, happened boolean, result anyelement,
 *		store regclass) returns idem_completion
 */
Datum
idem_resolve_any(PG_FUNCTION_ARGS)
{
	text	   *key = idem_arg_key(fcinfo, 0);
	Oid			store = idem_arg_store(fcinfo, 3);
	bool		isnull = PG_ARGISNULL(2);
	Datum		result = (Datum) 0;

	if (!isnull)
		result = idem_result_from_value(PG_GETARG_DATUM(2),
										get_fn_expr_argtype(fcinfo->flinfo, 2));
	return resolve(fcinfo, key, store, result, isnull);
}
