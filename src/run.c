/*-------------------------------------------------------------------------
 *
 * run.c
 *	  idem_run: claim, call a handler, complete with what it returns.
 *
 * The handler is looked up by name at every call, so a handler that was
 * dropped and made again is noticed.  It runs with the caller's rights, on a
 * snapshot taken after the key was locked, and inside the caller's
 * (sub)transaction: an error in it rolls back the claim along with whatever
 * it did.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "parser/parse_func.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "answer.h"
#include "arguments.h"
#include "claim.h"
#include "compat.h"
#include "key.h"
#include "pending.h"
#include "record.h"
#include "result.h"
#include "store.h"

typedef struct Handler
{
	Oid			function;
	int			nargs;			/* 0, or 1 that is jsonb */
	bool		strict;
	Oid			result_type;
} Handler;

PG_FUNCTION_INFO_V1(idem_run);

static void
refuse_handler(const char *name, const char *why)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("function \"%s\" cannot be a handler", name),
			 errdetail_internal("%s", why),
			 errhint("A handler is a function that takes jsonb, or nothing, and returns one value.")));
}

/*
 * Find the handler by its name, handler(jsonb) before handler(), or by its
 * signature.
 */
static Oid
find_handler(const char *name)
{
	Oid			jsonb = JSONBOID;
	List	   *names;
	Oid			function;

	/* A signature ends in ")"; a quoted name that holds one in a quote */
	if (name[0] != '\0' && name[strlen(name) - 1] == ')')
		return DatumGetObjectId(DirectFunctionCall1(regprocedurein,
													CStringGetDatum(name)));

	names = idem_parse_qualified_name(name);
	function = LookupFuncName(names, 1, &jsonb, true);
	if (!OidIsValid(function))
		function = LookupFuncName(names, 0, NULL, true);
	if (!OidIsValid(function))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("function %s(jsonb) or %s() does not exist",
						name, name),
				 errhint("Name the handler with its schema, or with its signature.")));
	return function;
}

static void
describe_handler(const char *name, Handler *handler)
{
	HeapTuple	tuple;
	Form_pg_proc proc;

	handler->function = find_handler(name);
	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(handler->function));
	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for function %u", handler->function);
	proc = (Form_pg_proc) GETSTRUCT(tuple);

	if (proc->prokind != PROKIND_FUNCTION)
		refuse_handler(name, "It is a procedure, an aggregate or a window function.");
	if (proc->proretset)
		refuse_handler(name, "It returns a set.");
	if (proc->pronargs > 1 ||
		(proc->pronargs == 1 && proc->proargtypes.values[0] != JSONBOID) ||
		OidIsValid(proc->provariadic))
		refuse_handler(name, "Its arguments are not those of a handler.");
	if (get_typtype(proc->prorettype) == TYPTYPE_PSEUDO &&
		proc->prorettype != VOIDOID && proc->prorettype != RECORDOID)
		refuse_handler(name, "It returns a pseudo-type.");
	handler->nargs = proc->pronargs;
	handler->strict = proc->proisstrict;
	handler->result_type = proc->prorettype;
	ReleaseSysCache(tuple);

	if (idem_function_aclcheck(handler->function, GetUserId()) != ACLCHECK_OK)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for function %s", name),
				 errhint("The owner can GRANT EXECUTE ON it.")));
}

/*
 * Call the handler.
 */
static Datum
call_handler(const Handler *handler, Jsonb *request, bool *isnull)
{
	LOCAL_FCINFO(fcinfo, 1);
	FmgrInfo	flinfo;
	List	   *args = NIL;
	Datum		result;

	InvokeFunctionExecuteHook(handler->function);
	fmgr_info(handler->function, &flinfo);
	if (handler->nargs == 1)
		args = list_make1(makeNullConst(JSONBOID, -1, InvalidOid));
	fmgr_info_set_expr((Node *) makeFuncExpr(handler->function,
											 handler->result_type, args,
											 InvalidOid, InvalidOid,
											 COERCE_EXPLICIT_CALL),
					   &flinfo);
	InitFunctionCallInfoData(*fcinfo, &flinfo, handler->nargs, InvalidOid,
							 NULL, NULL);
	if (handler->nargs == 1)
	{
		fcinfo->args[0].value = PointerGetDatum(request);
		fcinfo->args[0].isnull = request == NULL;
	}

	/* What other transactions committed while we waited must be visible */
	CommandCounterIncrement();
	PushActiveSnapshot(GetTransactionSnapshot());
	result = FunctionCallInvoke(fcinfo);
	*isnull = fcinfo->isnull || handler->result_type == VOIDOID;
	PopActiveSnapshot();
	return result;
}

/*
 * idem_run(key text, handler text, request jsonb, wait interval,
 *		first_sent timestamptz, store regclass) returns idem_outcome
 */
Datum
idem_run(PG_FUNCTION_ARGS)
{
	text	   *key = idem_arg_key(fcinfo, 0);
	Oid			store = idem_arg_store(fcinfo, 5);
	Jsonb	   *request = PG_ARGISNULL(2) ? NULL : PG_GETARG_JSONB_P(2);
	IdemClaimOptions options;
	IdemRecord	record;
	IdemAnswer	answer;
	IdemClaim  *claim;
	Handler		handler;
	char	   *name;
	Datum		result;
	bool		isnull;

	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("handler must not be null"),
				 errhint("Name a function that takes jsonb, or nothing.")));
	name = text_to_cstring(PG_GETARG_TEXT_PP(1));
	options.store = store;
	options.deadline = idem_arg_deadline(fcinfo, 3);
	options.has_first_sent = !PG_ARGISNULL(4);
	options.first_sent = options.has_first_sent ? PG_GETARG_TIMESTAMPTZ(4) : 0;

	idem_check_may_write("idem_run()");
	describe_handler(name, &handler);
	if (handler.strict && handler.nargs == 1 && request == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("request must not be null for strict handler \"%s\"",
						name),
				 errdetail("A strict function is not called with a null argument, so the work would be left undone."),
				 errhint("Pass a request, or declare the handler CALLED ON NULL INPUT.")));

	answer = idem_claim_key(&options, key, request, &record);
	if (answer != ANSWER_CLAIMED)
	{
		idem_raise_answer(answer, options.store, key, &record);
		PG_RETURN_DATUM(idem_outcome_datum(fcinfo, false, answer, &record));
	}

	/* It may have been replaced while we waited */
	describe_handler(name, &handler);
	result = call_handler(&handler, request, &isnull);

	/* The handler may have ended its claim itself */
	claim = idem_pending_find(options.store, key,
							  idem_key_hash(options.store, key));
	answer = ANSWER_COMPLETED;
	if (claim->status.state == CLAIM_HELD)
	{
		if (!isnull)
			result = idem_result_from_value(result, handler.result_type);
		idem_complete_claim(options.store, key, result, isnull, false,
							&record);
	}
	else if (!idem_find_own_completion(options.store, key, &record))
		answer = ANSWER_RELEASED;
	PG_RETURN_DATUM(idem_outcome_datum(fcinfo, true, answer, &record));
}
