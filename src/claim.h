/*-------------------------------------------------------------------------
 *
 * claim.h
 *	  Claim, complete and release keys inside a transaction.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_CLAIM_H
#define IDEM_CLAIM_H

#include "datatype/timestamp.h"
#include "utils/jsonb.h"

struct IdemStore;
struct IdemRecord;

/* What is asked for; the same for every key of a batch */
typedef struct IdemClaimOptions
{
	Oid			store;
	TimestampTz deadline;		/* DT_NOEND: no limit of its own */
	bool		has_first_sent;
	TimestampTz first_sent;
} IdemClaimOptions;

extern TimestampTz idem_deadline_default(void);
extern int	idem_claim_key(const IdemClaimOptions *options, text *key,
						   Jsonb *request, struct IdemRecord *record);
extern void idem_complete_claim(Oid store, text *key, Datum result,
								bool isnull, bool just_now,
								struct IdemRecord *written);
extern bool idem_find_own_completion(Oid store, text *key,
									 struct IdemRecord *record);
extern bool idem_release_claim(Oid store, text *key);
extern bool idem_forget_key(Oid store, text *key);
extern void idem_check_may_write(const char *function);

#endif							/* IDEM_CLAIM_H */
