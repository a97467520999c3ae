/*-------------------------------------------------------------------------
 *
 * bookkeeping.h
 *	  What idem_store_state says of a store.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_BOOKKEEPING_H
#define IDEM_BOOKKEEPING_H

#include "access/transam.h"
#include "datatype/timestamp.h"
#include "nodes/pg_list.h"

/* Retention of the default store, in seconds, as long as no row says else */
#define IDEM_DEFAULT_RETENTION	(INT64CONST(30) * SECS_PER_DAY)

/* A century: keeps all sums with timestamps far from their limits */
#define IDEM_MAX_RETENTION		(INT64CONST(36525) * SECS_PER_DAY)

/* What was noted when a generation was sealed; see expiry.c */
typedef struct IdemSeal
{
	bool		known;
	TimestampTz sealed_at;
	uint64		next_xid;		/* next transaction id at that time */
	Oid			relfile;		/* the file that this holds for */
} IdemSeal;

typedef struct IdemStoreState
{
	bool		has_local_row;	/* a row that was made in this database */
	bool		expires;		/* false: nothing here is ever emptied */
	int			current;		/* generation that plain inserts go to */
	int64		retention;		/* seconds, where expires */
	TimestampTz watermark;		/* cut-off of the latest emptying */
	TimestampTz filling_since;	/* of the current one; DT_NOBEGIN: unknown */
	TimestampTz last_step_at;	/* DT_NOBEGIN: never */
	int64		emptied;		/* how many generations, ever */
	char	   *trouble;		/* why expiry cannot go on, or NULL */
} IdemStoreState;

/* One assignment of idem_state_update() */
typedef struct IdemStateValue
{
	const char *column;			/* or an element of an array column */
	Datum		value;
	Oid			type;
	bool		isnull;
} IdemStateValue;

extern Oid	idem_extension_schema(void);
extern char *idem_database_origin(void);
extern void idem_state_read(Oid store, IdemStoreState *state);
extern void idem_state_read_seal(Oid store, int generation, IdemSeal *seal);
extern void idem_state_update(Oid store, const IdemStateValue *values,
							  int nvalues);
extern List *idem_state_stores(void);
extern void idem_state_forget_dropped(void);
extern void idem_state_forget_foreign(Oid store);
extern bool idem_state_lock(Oid store, bool wait);

#endif							/* IDEM_BOOKKEEPING_H */
