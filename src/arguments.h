/*-------------------------------------------------------------------------
 *
 * arguments.h
 *	  Arguments and results that many SQL functions share.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_ARGUMENTS_H
#define IDEM_ARGUMENTS_H

#include "datatype/timestamp.h"
#include "fmgr.h"

struct IdemRecord;

/* claimed, status, result, completed_at, token, lease_until, checkpoint */
#define IDEM_OUTCOME_COLUMNS	7

extern void idem_check_fits(bool fits);
extern void idem_check_nargs(FunctionCallInfo fcinfo, int nargs);
extern void idem_begin_rows(FunctionCallInfo fcinfo, int natts);
extern text *idem_check_key_datum(Datum key, bool isnull);
extern text *idem_arg_key(FunctionCallInfo fcinfo, int n);
extern Oid	idem_arg_store(FunctionCallInfo fcinfo, int n);
extern int64 idem_interval_usecs(const void *interval, const char *what);
extern int64 idem_arg_lease(FunctionCallInfo fcinfo, int n);
extern int64 idem_arg_token(FunctionCallInfo fcinfo, int n);
extern TimestampTz idem_arg_deadline(FunctionCallInfo fcinfo, int n);
extern void idem_outcome_values(bool claimed, int answer,
								const struct IdemRecord *record,
								Datum *values, bool *nulls);
extern Datum idem_outcome_datum(FunctionCallInfo fcinfo, bool claimed,
								int answer, const struct IdemRecord *record);
extern Datum idem_completion_datum(FunctionCallInfo fcinfo,
								   const struct IdemRecord *record);

#endif							/* IDEM_ARGUMENTS_H */
