/*-------------------------------------------------------------------------
 *
 * answer.h
 *	  What a claim is answered, and the errors that stand for some answers.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_ANSWER_H
#define IDEM_ANSWER_H

#include "datatype/timestamp.h"
#include "utils/jsonb.h"

struct IdemRecord;

/* What a claim of a key is answered; the texts are in idem_answer_name() */
typedef enum IdemAnswer
{
	ANSWER_CLAIMED,
	ANSWER_HELD,				/* by this transaction, not completed */
	ANSWER_COMPLETED,
	ANSWER_SKIPPED,
	ANSWER_IN_PROGRESS,			/* elsewhere, and the wait ran out */
	ANSWER_KEY_REUSED,			/* the request differs */
	ANSWER_UNCERTAIN,			/* a lease ran out */
	ANSWER_TOO_LATE,			/* its record may have expired */
	ANSWER_LEASED,				/* idem_lease(): the lease is the caller's */
	ANSWER_RELEASED				/* idem_run(): the handler gave it up */
} IdemAnswer;

extern const char *idem_answer_name(IdemAnswer answer);
extern IdemAnswer idem_judge(const struct IdemRecord *record, Jsonb *request);
extern bool idem_may_have_expired(Oid store, TimestampTz first_sent);
extern void idem_raise_answer(IdemAnswer answer, Oid store, text *key,
							  const struct IdemRecord *record);
extern void idem_raise_not_claimed(Oid store, text *key, const char *why);
extern void idem_raise_other_result(Oid store, text *key,
									const struct IdemRecord *record);
extern void idem_raise_conflict(Oid store, text *key);

#endif							/* IDEM_ANSWER_H */
