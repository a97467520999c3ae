/*-------------------------------------------------------------------------
 *
 * result.c
 *	  Results of operations as json.
 *
 * A result is stored as type json, which keeps the text it was given: member
 * order, spelling of numbers and escapes are part of the answer.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "fmgr.h"
#include "nodes/makefuncs.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"

#include "compat.h"
#include "result.h"

/*
 * Text must be valid JSON (error 22P02) and is kept byte for byte.
 */
Datum
idem_result_from_text(text *result)
{
	return DirectFunctionCall1(json_in,
							   CStringGetDatum(text_to_cstring(result)));
}

/*
 * A value of any type: text and varchar must be JSON, json and jsonb are kept
 * as they print, all else becomes what to_json() makes of it.
 */
Datum
idem_result_from_value(Datum value, Oid type)
{
	FmgrInfo	flinfo;
	Expr	   *arg;

	switch (getBaseType(type))
	{
		case TEXTOID:
		case VARCHAROID:
			return idem_result_from_text(DatumGetTextPP(value));
		case JSONOID:
			return value;
		case JSONBOID:
			return DirectFunctionCall1(json_in,
									   DirectFunctionCall1(jsonb_out, value));
		default:
			break;
	}

	/* to_json() asks its call expression for the type of its argument */
	arg = (Expr *) makeNullConst(type, -1, get_typcollation(type));
	fmgr_info(F_TO_JSON, &flinfo);
	fmgr_info_set_expr((Node *) makeFuncExpr(F_TO_JSON, JSONOID,
											 list_make1(arg), InvalidOid,
											 InvalidOid,
											 COERCE_EXPLICIT_CALL),
					   &flinfo);
	return FunctionCall1(&flinfo, value);
}
