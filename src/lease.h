/*-------------------------------------------------------------------------
 *
 * lease.h
 *	  Effects outside the database: committed, timed claims.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_LEASE_H
#define IDEM_LEASE_H

#include "datatype/timestamp.h"
#include "utils/jsonb.h"

struct IdemRecord;

/* What to do where nobody knows whether the effect happened */
typedef enum IdemUncertainPolicy
{
	POLICY_RECONCILE,
	POLICY_RETRY,
	POLICY_SKIP
} IdemUncertainPolicy;

typedef struct IdemLeaseRequest
{
	Jsonb	   *request;		/* or NULL */
	int64		duration;		/* microseconds */
	IdemUncertainPolicy policy;
	int64		retry_window;	/* microseconds; PG_INT64_MAX: no limit */
	bool		has_first_sent;
	TimestampTz first_sent;
} IdemLeaseRequest;

extern int	idem_lease_key(Oid store, text *key,
						   const IdemLeaseRequest *lease,
						   TimestampTz deadline, struct IdemRecord *record);
extern void idem_checkpoint_lease(Oid store, text *key, int64 token,
								  Datum checkpoint, bool isnull);
extern TimestampTz idem_extend_lease(Oid store, text *key, int64 token,
									 int64 duration);
extern void idem_complete_lease(Oid store, text *key, int64 token,
								Datum result, bool isnull,
								struct IdemRecord *written);
extern bool idem_release_lease(Oid store, text *key, int64 token);
extern void idem_resolve_key(Oid store, text *key, bool happened,
							 Datum result, bool isnull,
							 struct IdemRecord *written);

#endif							/* IDEM_LEASE_H */
