/*-------------------------------------------------------------------------
 *
 * record.c
 *	  Look up the record of a key in all generations of a store.
 *
 * Every look-up reads every generation, through the unique index on key,
 * newest first.  Nothing that is only noted somewhere (which generation is
 * current, which were emptied) may decide that a record is absent.
 *
 * Claims look with a dirty snapshot: what counts is what has been committed
 * by now, and what another open transaction is about to commit, whatever the
 * caller's isolation level.  No SIREAD locks are taken (the predicate lock
 * manager ignores snapshots that are not MVCC), so that transactions on
 * different keys never conflict.  A dirty scan can miss a row that is being
 * updated under it; all writers of idem hold the key's lock, so with that
 * lock "absent" is certain.  Without it only a finding counts.
 *
 * Under REPEATABLE READ and SERIALIZABLE the scan returns every version and
 * each is held against both the dirty and the transaction's snapshot: where
 * the two differ, and not by the transaction's own doing, the caller must
 * raise a serialization failure.
 *
 * Locks: AccessShareLock on each partition and its index, one after the
 * other, released as soon as what was found has been copied out, so that a
 * transaction of many claims stays within its fast-path slots.  Nothing else
 * is waited for while one is held.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/transam.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "executor/tuptable.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "record.h"
#include "store.h"

/*
 * A final record says that the operation is over.
 */
static bool
is_final(int status)
{
	return status == IDEM_COMPLETED || status == IDEM_SKIPPED;
}

/*
 * If a key stands twice (rows that were copied in by hand), a final record
 * beats any other, then the one completed later.
 */
static bool
beats(int status, TimestampTz completed_at, const IdemRecord *record)
{
	if (!record->found)
		return true;
	if (is_final(status) != is_final(record->status))
		return is_final(status);
	if (record->nulls[IDEM_COMPLETED_AT])
		return completed_at != DT_NOBEGIN;
	return completed_at >
		DatumGetTimestampTz(record->values[IDEM_COMPLETED_AT]);
}

/*
 * Up to where WAL must be flushed for the tuple in "slot" to be safe.
 *
 * The commit LSN is known as long as xmin is: hinted or not, since a hint
 * may be set before the flush if the page cannot be written before it.  Once
 * xmin is frozen, the page's LSN is not older than the freezing, which came
 * after the commit.  Transactions that committed synchronously have no
 * commit LSN there, and need none.
 */
static XLogRecPtr
commit_lsn_of(TupleTableSlot *slot)
{
	BufferHeapTupleTableSlot *bslot = (BufferHeapTupleTableSlot *) slot;
	HeapTupleHeader header = bslot->base.tuple->t_data;

	Assert(TTS_IS_BUFFERTUPLE(slot));
	if (HeapTupleHeaderXminFrozen(header))
		return BufferGetLSNAtomic(bslot->buffer);
	return TransactionIdGetCommitLSN(HeapTupleHeaderGetRawXmin(header));
}

static TransactionId
xmin_of(TupleTableSlot *slot)
{
	HeapTuple	tuple = ((BufferHeapTupleTableSlot *) slot)->base.tuple;

	return HeapTupleHeaderGetXmin(tuple->t_data);
}

static bool
deleted_by_this_transaction(TupleTableSlot *slot)
{
	HeapTupleHeader header =
		((BufferHeapTupleTableSlot *) slot)->base.tuple->t_data;
	TransactionId xmax;

	if ((header->t_infomask & HEAP_XMAX_INVALID) ||
		HEAP_XMAX_IS_LOCKED_ONLY(header->t_infomask))
		return false;
	xmax = HeapTupleHeaderGetUpdateXid(header);
	return TransactionIdIsCurrentTransactionId(xmax);
}

/*
 * Take over what is in "slot" if it beats what was found before.
 */
static void
consider(const IdemPartition *part, int generation, TupleTableSlot *slot,
		 bool own, IdemRecord *record)
{
	TupleDesc	desc = slot->tts_tupleDescriptor;
	Datum		value;
	bool		isnull;
	int			status = IDEM_UNKNOWN_STATUS;
	TimestampTz completed_at;

	value = slot_getattr(slot, part->attnum[IDEM_STATUS], &isnull);
	if (!isnull)
		status = idem_status_from_text(DatumGetTextPP(value));
	if (status == IDEM_UNKNOWN_STATUS)
		ereport(ERROR,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("record with an unknown status in partition \"%s\"",
						get_rel_name(part->relid)),
				 errhint("It may have been written by hand or by a later version of idem.")));

	value = slot_getattr(slot, part->attnum[IDEM_COMPLETED_AT], &isnull);
	completed_at = isnull ? DT_NOBEGIN : DatumGetTimestampTz(value);
	record->count++;
	record->foreign += !own;
	if (!beats(status, completed_at, record))
		return;

	record->found = true;
	record->own = own;
	record->status = status;
	record->generation = generation;
	record->tid = slot->tts_tid;
	record->commit_lsn = own ? InvalidXLogRecPtr : commit_lsn_of(slot);
	if (record->values == NULL)
	{
		record->values = palloc0(sizeof(Datum) * IDEM_NCOLUMNS);
		record->nulls = palloc0(sizeof(bool) * IDEM_NCOLUMNS);
	}
	for (int c = 0; c < IDEM_NCOLUMNS; c++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, part->attnum[c] - 1);

		value = slot_getattr(slot, part->attnum[c], &record->nulls[c]);
		if (record->nulls[c])
			record->values[c] = (Datum) 0;
		else if (att->attlen == -1)
			record->values[c] = PointerGetDatum(PG_DETOAST_DATUM_COPY(value));
		else
			record->values[c] = datumCopy(value, att->attbyval, att->attlen);
	}
}

/* A scan of one partition's index for a key */
typedef struct KeyScan
{
	Relation	heap;
	Relation	index;			/* NULL: the partition has no block */
	TupleTableSlot *slot;
	IndexScanDesc scan;
} KeyScan;

/*
 * Open a generation and scan its index; false if the store turns out to have
 * changed by the time the partition is locked (its index may be another one
 * now): then nothing is open.
 */
static bool
begin_key_scan(KeyScan *ks, const IdemStore *store, int generation, text *key,
			   Snapshot snapshot)
{
	const IdemPartition *part = &store->part[generation];
	ScanKeyData skey;

	LockRelationOid(part->relid, AccessShareLock);
	if (!idem_store_unchanged(store))
	{
		UnlockRelationOid(part->relid, AccessShareLock);
		return false;
	}
	ks->heap = table_open(part->relid, NoLock);
	ks->index = NULL;
	if (RelationGetNumberOfBlocks(ks->heap) == 0)
		return true;
	ks->index = index_open(part->key_index, AccessShareLock);
	ks->slot = table_slot_create(ks->heap, NULL);
	ks->scan = idem_index_beginscan(ks->heap, ks->index, snapshot);
	ScanKeyInit(&skey, 1, BTEqualStrategyNumber, F_TEXTEQ,
				PointerGetDatum(key));
	index_rescan(ks->scan, &skey, 1, NULL, 0);
	return true;
}

static bool
next_in_key_scan(KeyScan *ks)
{
	return ks->index != NULL &&
		index_getnext_slot(ks->scan, ForwardScanDirection, ks->slot);
}

static void
end_key_scan(KeyScan *ks)
{
	if (ks->index != NULL)
	{
		index_endscan(ks->scan);
		ExecDropSingleTupleTableSlot(ks->slot);
		index_close(ks->index, AccessShareLock);
	}
	table_close(ks->heap, AccessShareLock);
}

/*
 * Look in one generation, as of now; false if the store has changed.
 * "snapshot" is the transaction's, where that is fixed, otherwise NULL.
 */
static bool
find_in_generation(const IdemStore *store, int generation, text *key,
				   Snapshot snapshot, IdemRecord *record)
{
	SnapshotData dirty;
	KeyScan		ks;

	InitDirtySnapshot(dirty);
	if (!begin_key_scan(&ks, store, generation, key,
						snapshot ? SnapshotAny : &dirty))
		return false;
	while (next_in_key_scan(&ks))
	{
		bool		own;

		if (snapshot != NULL)
		{
			bool		seen = table_tuple_satisfies_snapshot(ks.heap, ks.slot,
															  snapshot);
			bool		live = table_tuple_satisfies_snapshot(ks.heap, ks.slot,
															  &dirty);

			if (!live)
			{
				/* went away since, unless it was this transaction's doing */
				if (seen && !deleted_by_this_transaction(ks.slot))
					record->snapshot_differs = true;
				continue;
			}
			if (!seen && !TransactionIdIsValid(dirty.xmin) &&
				!TransactionIdIsCurrentTransactionId(xmin_of(ks.slot)))
				record->snapshot_differs = true;
		}

		if (TransactionIdIsValid(dirty.xmin))
		{
			record->insert_in_flux = dirty.xmin;
			continue;			/* not committed: nothing to report */
		}
		if (TransactionIdIsValid(dirty.xmax))
			record->in_flux = dirty.xmax;

		own = TransactionIdIsCurrentTransactionId(xmin_of(ks.slot));
		consider(&store->part[generation], generation, ks.slot, own, record);
	}
	end_key_scan(&ks);
	return true;
}

/*
 * Find the record of "key" as of now.  Never waits for another transaction:
 * if one is writing a record of the key, record->in_flux is its xid, and a
 * record that is reported besides may be about to be replaced by it.
 *
 * The caller has accepted invalidations, and holds the key's lock if it is
 * going to conclude anything from an absence.  *store is replaced if it has
 * changed in the meantime.
 */
void
idem_record_find(IdemStore **store, text *key, IdemRecord *record)
{
	Snapshot	snapshot = NULL;
	int			done = 0;

	if (IsolationUsesXactSnapshot())
		snapshot = RegisterSnapshot(GetTransactionSnapshot());

	memset(record, 0, sizeof(IdemRecord));
	while (done < (*store)->nparts)
	{
		int			generation = ((*store)->current - done +
								  (*store)->nparts) % (*store)->nparts;

		if (find_in_generation(*store, generation, key, snapshot, record))
			done++;
		else
		{
			*store = idem_store_refresh(*store);
			memset(record, 0, sizeof(IdemRecord));
			done = 0;
		}
	}

	if (snapshot != NULL)
		UnregisterSnapshot(snapshot);

	/* A final record stands, whatever another transaction adds to it */
	if (!TransactionIdIsValid(record->in_flux) &&
		!(record->found && is_final(record->status)))
		record->in_flux = record->insert_in_flux;
}

/*
 * Has a record of "key" come into any generation "but" the one where the
 * unique index will tell?  For a writer that has found none before, and has
 * locked that partition: rows written without the key's lock are noticed if
 * they are there by now.  *in_flux is the xid of an open transaction that is
 * writing one.
 *
 * *store is replaced if it has changed, which can mean that another
 * generation is current.
 */
bool
idem_record_appeared(IdemStore **store, text *key, int but,
					 TransactionId *in_flux)
{
	Snapshot	snapshot = NULL;
	IdemRecord	record;
	int			generation = 0;

	if (IsolationUsesXactSnapshot())
		snapshot = RegisterSnapshot(GetTransactionSnapshot());

	memset(&record, 0, sizeof(IdemRecord));
	while (generation < (*store)->nparts)
	{
		if (generation == but ||
			find_in_generation(*store, generation, key, snapshot, &record))
			generation++;
		else
		{
			*store = idem_store_refresh(*store);
			memset(&record, 0, sizeof(IdemRecord));
			generation = 0;
		}
	}

	if (snapshot != NULL)
		UnregisterSnapshot(snapshot);

	*in_flux = record.found ? InvalidTransactionId : record.insert_in_flux;
	return record.found || record.snapshot_differs;
}

/*
 * Find the record of "key" as "snapshot" sees it: an ordinary read.
 */
void
idem_record_find_mvcc(IdemStore **store, text *key, Snapshot snapshot,
					  IdemRecord *record)
{
	KeyScan		ks;
	int			done = 0;

	memset(record, 0, sizeof(IdemRecord));
	while (done < (*store)->nparts)
	{
		if (!begin_key_scan(&ks, *store, done, key, snapshot))
		{
			*store = idem_store_refresh(*store);
			memset(record, 0, sizeof(IdemRecord));
			done = 0;
			continue;
		}
		while (next_in_key_scan(&ks))
			consider(&(*store)->part[done], done, ks.slot, false, record);
		end_key_scan(&ks);
		done++;
	}
}

/*
 * An answer must be no less durable than the record it repeats.
 */
void
idem_record_make_durable(const IdemRecord *record)
{
	if (!XLogRecPtrIsInvalid(record->commit_lsn))
		XLogFlush(record->commit_lsn);
}

/*
 * Set the status, as it is here and as it is stored.
 */
void
idem_record_set_status(IdemRecord *record, int status)
{
	record->status = status;
	record->values[IDEM_STATUS] =
		CStringGetTextDatum(idem_status_name((IdemStatus) status));
	record->nulls[IDEM_STATUS] = false;
}

/*
 * Set a column; the caller sees to the type.
 */
void
idem_record_set(IdemRecord *record, int column, Datum value, bool isnull)
{
	record->values[column] = isnull ? (Datum) 0 : value;
	record->nulls[column] = isnull;
}

/*
 * A record that starts as a copy of another.
 */
void
idem_record_copy(IdemRecord *record, const IdemRecord *from)
{
	*record = *from;
	record->values = palloc(sizeof(Datum) * IDEM_NCOLUMNS);
	record->nulls = palloc(sizeof(bool) * IDEM_NCOLUMNS);
	memcpy(record->values, from->values, sizeof(Datum) * IDEM_NCOLUMNS);
	memcpy(record->nulls, from->nulls, sizeof(bool) * IDEM_NCOLUMNS);
}

/*
 * Start a new record; the columns not set here are NULL.
 */
void
idem_record_init(IdemRecord *record, text *key, int status,
				 TimestampTz claimed_at)
{
	memset(record, 0, sizeof(IdemRecord));
	record->found = record->own = true;
	record->values = palloc0(sizeof(Datum) * IDEM_NCOLUMNS);
	record->nulls = palloc(sizeof(bool) * IDEM_NCOLUMNS);
	memset(record->nulls, true, sizeof(bool) * IDEM_NCOLUMNS);
	idem_record_set_status(record, status);
	record->values[IDEM_KEY] = PointerGetDatum(key);
	record->nulls[IDEM_KEY] = false;
	record->values[IDEM_ATTEMPTS] = Int32GetDatum(0);
	record->nulls[IDEM_ATTEMPTS] = false;
	record->values[IDEM_CLAIMED_AT] = TimestampTzGetDatum(claimed_at);
	record->nulls[IDEM_CLAIMED_AT] = false;
	record->values[IDEM_COMPLETED_AT] =
		TimestampTzGetDatum(GetCurrentTimestamp());
	record->nulls[IDEM_COMPLETED_AT] = false;
}

/*
 * How often the operation of a replaced record was tried before.
 */
int32
idem_record_attempts(const IdemRecord *record)
{
	if (!record->found || record->nulls[IDEM_ATTEMPTS])
		return 0;
	return DatumGetInt32(record->values[IDEM_ATTEMPTS]);
}
