/*-------------------------------------------------------------------------
 *
 * store.h
 *	  One store: its structure, and what is cached of it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_STORE_H
#define IDEM_STORE_H

#include "access/attnum.h"
#include "nodes/parsenodes.h"
#include "storage/lockdefs.h"

/* The columns of a store, in the order of the type idem_completion */
typedef enum IdemColumn
{
	IDEM_KEY,
	IDEM_STATUS,
	IDEM_ATTEMPTS,
	IDEM_TOKEN,
	IDEM_CLAIMED_AT,
	IDEM_COMPLETED_AT,
	IDEM_LEASE_UNTIL,
	IDEM_CLAIMED_BY,
	IDEM_FINGERPRINT,
	IDEM_CHECKPOINT,
	IDEM_RESULT,
	IDEM_GENERATION,
	IDEM_NCOLUMNS
} IdemColumn;

/* The status column; IDEM_UNKNOWN_STATUS stands for any text but these */
typedef enum IdemStatus
{
	IDEM_UNKNOWN_STATUS,
	IDEM_COMPLETED,
	IDEM_LEASED,
	IDEM_SKIPPED,
	IDEM_RELEASED
} IdemStatus;

/* One generation: what look-ups and inserts need to know of its partition */
typedef struct IdemPartition
{
	Oid			relid;
	Oid			key_index;		/* valid, unique, immediate, on key alone */
	Oid			time_index;		/* BRIN on completed_at, or InvalidOid */
	Oid			lease_index;	/* WHERE status = 'leased', or InvalidOid */
	bool		plain;			/* see describe_partition() */
	AttrNumber	attnum[IDEM_NCOLUMNS];	/* where each column is here */
} IdemPartition;

/*
 * A store as it was when it was last checked.  Always a private copy in the
 * caller's memory context, since anything that runs user code or waits can
 * make the cached one change.
 */
typedef struct IdemStore
{
	Oid			relid;			/* the partitioned table */
	uint64		serial;			/* which check this is the result of */
	uint64		invalidations;	/* how many there had been by then */
	int			current;		/* generation new rows go to; -1: not asked */
	int			nparts;
	IdemPartition part[FLEXIBLE_ARRAY_MEMBER];	/* by generation */
} IdemStore;

#define IDEM_STORE_SIZE(nparts) \
	(offsetof(IdemStore, part) + sizeof(IdemPartition) * (nparts))

#define IDEM_MAX_GENERATIONS	100

/* structure.c */
extern IdemStore *idem_store_describe(Oid relid);
extern IdemStatus idem_status_from_text(const text *status);
extern const char *idem_status_name(IdemStatus status);
extern const char *idem_column_name(int column);
extern Oid	idem_column_type(int column);

/* store.c */
extern void idem_store_init(void);
extern IdemStore *idem_store_open(Oid relid, AclMode privileges,
								  LOCKMODE lockmode);
extern IdemStore *idem_store_open_unchecked(Oid relid, LOCKMODE lockmode);
extern bool idem_store_unchanged(const IdemStore *store);
extern IdemStore *idem_store_refresh(IdemStore *store);
extern char *idem_store_name(Oid relid);
extern Oid	idem_table_owner(Oid relid);

#endif							/* IDEM_STORE_H */
