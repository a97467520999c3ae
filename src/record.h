/*-------------------------------------------------------------------------
 *
 * record.h
 *	  Look up the record of a key in all generations of a store.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RECORD_H
#define IDEM_RECORD_H

#include "access/xlogdefs.h"
#include "datatype/timestamp.h"
#include "storage/itemptr.h"
#include "utils/snapshot.h"

struct IdemStore;

/* What idem_record_find() saw of a key */
typedef struct IdemRecord
{
	int			count;			/* live records; only one should stand */
	int			foreign;		/* of these, not by this transaction */
	bool		found;			/* count > 0; what follows is the one that */
								/* counts */
	bool		own;			/* written by this transaction */
	int			status;			/* IdemStatus */
	int			generation;
	ItemPointerData tid;
	XLogRecPtr	commit_lsn;		/* flushed up to here, it is durable */
	Datum	   *values;			/* IDEM_NCOLUMNS, copied and detoasted, */
	bool	   *nulls;			/* in the caller's memory context */

	/* Another open transaction is writing a record of this key */
	TransactionId in_flux;
	TransactionId insert_in_flux;	/* ... adding one; for record.c only */

	/* The transaction's snapshot sees something else (REPEATABLE READ) */
	bool		snapshot_differs;
} IdemRecord;

extern void idem_record_find(struct IdemStore **store, text *key,
							 IdemRecord *record);
extern bool idem_record_appeared(struct IdemStore **store, text *key,
								 int but, TransactionId *in_flux);
extern void idem_record_find_mvcc(struct IdemStore **store, text *key,
								  Snapshot snapshot, IdemRecord *record);
extern void idem_record_init(IdemRecord *record, text *key, int status,
							 TimestampTz claimed_at);
extern void idem_record_copy(IdemRecord *record, const IdemRecord *from);
extern void idem_record_set_status(IdemRecord *record, int status);
extern void idem_record_set(IdemRecord *record, int column, Datum value,
							bool isnull);
extern int32 idem_record_attempts(const IdemRecord *record);
extern void idem_record_make_durable(const IdemRecord *record);

#endif							/* IDEM_RECORD_H */
