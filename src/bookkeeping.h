/*-------------------------------------------------------------------------
 *
 * bookkeeping.h
 *	  What idem_store_state says of a store: current generation, retention.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_BOOKKEEPING_H
#define IDEM_BOOKKEEPING_H

#include "datatype/timestamp.h"

/* Retention of the default store, in seconds, as long as no row says else */
#define IDEM_DEFAULT_RETENTION	(INT64CONST(30) * SECS_PER_DAY)

typedef struct IdemStoreState
{
	bool		expires;		/* false: nothing here is ever emptied */
	int			current;		/* generation that plain inserts go to */
	int64		retention;		/* seconds, where expires */
	TimestampTz watermark;		/* cut-off of the latest emptying */
} IdemStoreState;

extern Oid	idem_extension_schema(void);
extern void idem_state_read(Oid store, IdemStoreState *state);
extern void idem_state_set_retention(Oid store, int64 retention);

#endif							/* IDEM_BOOKKEEPING_H */
