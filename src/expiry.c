/*-------------------------------------------------------------------------
 *
 * expiry.c
 *	  The state machine of generations.
 *
 *		empty -> filling -> full -> sealed -> empty
 *
 * Each arrow is one short transaction (idem_expiry_step() does at most one),
 * may be repeated after a crash at any point, and leaves everything as it is
 * if something is in the way.  Nothing is ever deleted row by row: a
 * generation whose last record is older than the retention R is truncated.
 *
 * The state of a generation is read off the data: "filling" is the one that
 * the bookkeeping calls current, any other without a block is "empty", one
 * with a valid note of its sealing is "sealed", the rest are "full".  So
 * wrong or lost bookkeeping can only make a generation wait to be sealed
 * again.
 *
 * Why no completion can be lost or come early:
 *
 * - A transaction that completed before the flip and commits long after:
 *	 it holds the partition's lock (RowExclusive, charged to its
 *	 (sub)transaction, see write.c) until it ends.  Sealing needs SHARE ROW
 *	 EXCLUSIVE for a moment, so it comes after that commit, and emptying R
 *	 after the sealing.
 * - One that claimed before the flip and completes after the sealing: it
 *	 asks for the current generation when it completes, with the partition
 *	 locked and invalidations accepted after that.
 * - A flip that a sealing session sees before its invalidation has reached a
 *	 writer: every step holds the store's lock, which the flip releases only
 *	 after its invalidation was sent.  A writer that still went to the old
 *	 generation had its partition lock before the sealing and is waited for;
 *	 one that locks it after the sealing finds the invalidation.
 * - A writer that already holds the old partition's lock, for an earlier
 *	 row: it accepts invalidations for each row nevertheless.
 * - Rows copied into any generation, by hand or by a restore: emptying proves
 *	 from the rows themselves, with a snapshot taken under a lock that keeps
 *	 writers out, that there is no open lease and nothing younger than R.
 * - Open leases outlive R: they are moved to the current generation first,
 *	 each under its key's lock, so that a claim that holds the lock and looks
 *	 in one generation after the other finds it exactly once.
 * - A reader whose snapshot is older than such a move must find the record
 *	 where it was, but TRUNCATE is not MVCC: so emptying waits until no
 *	 snapshot older than the transaction id noted at sealing is left.
 * - idem_set_retention() that returns while an emptying by the old retention
 *	 commits: both hold the store's lock to their end and read under it.
 * - first_sent: the watermark is moved in the transaction that truncates, and
 *	 claims read it after their look-up.
 * - A clock set back makes things late.  (Set forward: see the README.)
 *
 * Nothing here waits: locks are taken conditionally, in the order store's
 * lock, partition, its TOAST table, its indexes; lock_timeout bounds what the
 * server itself locks on the way.  A look-up that comes between the ACCESS
 * EXCLUSIVE lock and the commit waits for one TRUNCATE of one partition.
 *
 * The caller runs each step as the owner of the store in a security-
 * restricted context: triggers, index expressions and the like that belong
 * to the store run with its owner's rights.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/transam.h"
#include "access/xact.h"
#include "catalog/pg_class.h"
#include "catalog/pg_subscription_rel.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "storage/procarray.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "bookkeeping.h"
#include "compat.h"
#include "expiry.h"
#include "key.h"
#include "record.h"
#include "store.h"
#include "wait.h"
#include "write.h"

/* Leases moved in one transaction, each with a key lock */
#define CARRY_OVER_BATCH	100

/*
 * "what" is a condition on the columns of a store; $1 in it is the cut-off.
 * Does a row of the partition satisfy it now?
 *
 * Row security of the partition must not hide anything: with row_security
 * off that is an error.  With seqscan off, the BRIN or partial index is used
 * if there is one; ranges it does not know yet are read.
 */
static bool
exists_row(Oid partition, const char *what, TimestampTz cutoff)
{
	char	   *query = psprintf("SELECT 1 FROM ONLY %s WHERE %s LIMIT 1",
								 idem_store_name(partition), what);
	Oid			types[1] = {TIMESTAMPTZOID};
	Datum		args[1] = {TimestampTzGetDatum(cutoff)};
	SPIPlanPtr	plan;
	Snapshot	snapshot;
	bool		found;

	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	plan = SPI_prepare(query, 1, types);
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	if (plan == NULL ||
		SPI_execute_snapshot(plan, args, NULL, snapshot, InvalidSnapshot,
							 true, false, 1) != SPI_OK_SELECT)
		elog(ERROR, "could not execute: %s", query);
	found = SPI_processed > 0;
	UnregisterSnapshot(snapshot);
	SPI_finish();
	return found;
}

#define OPEN_LEASE \
	"status OPERATOR(pg_catalog.=) 'leased'"
#define NOT_OLDER \
	"completed_at OPERATOR(pg_catalog.>=) $1 OR completed_at IS NULL"

/*
 * Note something in the bookkeeping, and that a step was done.
 */
static void
note_step(Oid store, IdemStateValue *values, int nvalues)
{
	IdemStateValue step[12];

	memcpy(step, values, sizeof(IdemStateValue) * nvalues);
	step[nvalues++] = (IdemStateValue)
	{
		"last_step_at", TimestampTzGetDatum(GetCurrentTimestamp()),
			TIMESTAMPTZOID, false
	};
	idem_state_update(store, step, nvalues);
}

static IdemStateValue
seal_value(const char *column, int generation, Oid type, Datum value,
		   bool isnull)
{
	IdemStateValue result = {
		psprintf("%s[%d]", column, generation + 1), value, type, isnull
	};

	return result;
}

/*
 * The assignments that erase the note of a sealing.
 */
static void
erase_seal(int generation, IdemStateValue *values)
{
	values[0] = seal_value("sealed_at", generation, TIMESTAMPTZOID, 0, true);
	values[1] = seal_value("sealed_xid", generation, XID8OID, 0, true);
	values[2] = seal_value("sealed_file", generation, OIDOID, 0, true);
}

/*
 * How many blocks a partition has; -1 if it is locked against readers.
 */
static int64
partition_blocks(Oid partition)
{
	Relation	rel;
	BlockNumber blocks;

	if (!ConditionalLockRelationOid(partition, AccessShareLock))
		return -1;
	rel = table_open(partition, NoLock);
	blocks = RelationGetNumberOfBlocks(rel);
	table_close(rel, AccessShareLock);
	return blocks;
}

/*
 * filling -> full, and the next one empty -> filling, if it is time.
 *
 * The next generation only has to look empty: a row that is just being
 * inserted there by hand is in the current generation then.
 */
static bool
flip(const IdemStore *store, const IdemStoreState *state)
{
	int			current = state->current;
	int			next = (current + 1) % store->nparts;
	TimestampTz now = GetCurrentTimestamp();
	int64		period = state->retention * USECS_PER_SEC /
		Max(store->nparts - 1, 1);
	IdemStateValue values[8];

	/* As long as there is nothing, nothing is noted either */
	if (partition_blocks(store->part[current].relid) <= 0)
		return false;
	if (state->filling_since == DT_NOBEGIN)
	{
		values[0] = (IdemStateValue)
		{
			"filling_since", TimestampTzGetDatum(now), TIMESTAMPTZOID, false
		};
		note_step(store->relid, values, 1);
		return true;
	}
	if (now < state->filling_since + period)
		return false;
	if (partition_blocks(store->part[next].relid) != 0)
		return false;

	erase_seal(current, values);
	erase_seal(next, values + 3);
	values[6] = (IdemStateValue)
	{
		"current", Int16GetDatum(next), INT2OID, false
	};
	values[7] = (IdemStateValue)
	{
		"filling_since", TimestampTzGetDatum(now), TIMESTAMPTZOID, false
	};
	note_step(store->relid, values, 8);
	return true;
}

/*
 * Keys of open leases in a partition, up to CARRY_OVER_BATCH of them.
 */
static List *
open_leases(Oid partition)
{
	MemoryContext context = CurrentMemoryContext;
	List	   *keys = NIL;
	char	   *query = psprintf("SELECT key FROM ONLY %s WHERE " OPEN_LEASE,
								 idem_store_name(partition));

	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	if (SPI_execute(query, true, CARRY_OVER_BATCH) != SPI_OK_SELECT)
		elog(ERROR, "could not execute: %s", query);
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		MemoryContext spi_context = MemoryContextSwitchTo(context);
		bool		isnull;
		Datum		key = SPI_getbinval(SPI_tuptable->vals[i],
										SPI_tuptable->tupdesc, 1, &isnull);

		keys = lappend(keys, DatumGetTextPCopy(key));
		MemoryContextSwitchTo(spi_context);
	}
	SPI_finish();
	return keys;
}

/*
 * Delete a lease that does not count, because the key stands twice and the
 * other record does.
 */
static bool
delete_lease(Oid partition, text *key)
{
	Oid			types[1] = {TEXTOID};
	Datum		args[1] = {PointerGetDatum(key)};
	bool		deleted;
	char	   *query = psprintf("DELETE FROM ONLY %s WHERE " OPEN_LEASE
								 " AND key OPERATOR(pg_catalog.=) $1",
								 idem_store_name(partition));

	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	if (SPI_execute_with_args(query, 1, types, args, NULL, false,
							  0) != SPI_OK_DELETE)
		elog(ERROR, "could not execute: %s", query);
	deleted = SPI_processed > 0;
	SPI_finish();
	return deleted;
}

/*
 * Move open leases to the current generation; those whose key is in use are
 * left for the next round.  True if any was moved.
 */
static bool
carry_over_leases(Oid relid, int generation)
{
	IdemStore  *store = idem_store_open_unchecked(relid, RowExclusiveLock);
	ListCell   *lc;
	bool		moved = false;

	foreach(lc, open_leases(store->part[generation].relid))
	{
		text	   *key = lfirst(lc);
		LOCKTAG		tag;
		IdemRecord	old;
		IdemRecord	record;

		idem_key_locktag(&tag, idem_key_hash(store->relid, key));
		if (!idem_key_lock(&tag))
			continue;
		store = idem_store_refresh(store);
		idem_record_find(&store, key, &old);
		if (TransactionIdIsValid(old.in_flux) || !old.found ||
			generation == store->current)
		{
			idem_key_unlock(&tag);
			continue;
		}
		if (old.status == IDEM_LEASED && old.generation == generation)
		{
			record = old;
			idem_record_replace(store, key, &old, &record);
			store = idem_store_open_unchecked(relid, RowExclusiveLock);
			moved = true;
		}
		else if (delete_lease(store->part[generation].relid, key))
			moved = true;
	}
	return moved;
}

/*
 * full -> sealed.  With the lock had for a moment, no transaction that wrote
 * there is still open; without an open lease, nothing more will move.
 */
static bool
seal(const IdemStore *store, int generation)
{
	Oid			partition = store->part[generation].relid;
	IdemStateValue values[3];
	Relation	rel;
	Oid			relfile;
	uint64		next_xid;

	if (!ConditionalLockRelationOid(partition, ShareRowExclusiveLock))
		return false;
	rel = table_open(partition, NoLock);
	relfile = rel->rd_rel->relfilenode;
	if (!exists_row(partition, OPEN_LEASE " AND $1 IS NOT NULL", 0))
	{
		values[0] = seal_value("sealed_at", generation, TIMESTAMPTZOID,
							   TimestampTzGetDatum(GetCurrentTimestamp()),
							   false);
		next_xid = U64FromFullTransactionId(ReadNextFullTransactionId());
		values[1] = seal_value("sealed_xid", generation, XID8OID,
							   UInt64GetDatum(next_xid), false);
		values[2] = seal_value("sealed_file", generation, OIDOID,
							   ObjectIdGetDatum(relfile), false);
		note_step(store->relid, values, 3);
		table_close(rel, NoLock);
		return true;
	}
	table_close(rel, NoLock);
	return false;
}

/*
 * Is there a snapshot that is older than this transaction id?
 */
static bool
older_snapshot_exists(Relation rel, uint64 xid)
{
	FullTransactionId next = ReadNextFullTransactionId();
	TransactionId oldest = GetOldestNonRemovableTransactionId(rel);
	uint64		full_oldest = U64FromFullTransactionId(next) -
		(uint32) (XidFromFullTransactionId(next) - oldest);

	return full_oldest < xid;
}

/*
 * Lock everything that TRUNCATE will lock, without waiting.
 */
static bool
lock_for_truncate(Oid partition)
{
	Relation	rel;
	Oid			toast;
	List	   *indexes;
	ListCell   *lc;
	bool		success = true;

	if (!ConditionalLockRelationOid(partition, AccessExclusiveLock))
		return false;
	rel = table_open(partition, NoLock);
	toast = rel->rd_rel->reltoastrelid;
	indexes = RelationGetIndexList(rel);
	table_close(rel, NoLock);

	if (OidIsValid(toast))
	{
		if (!ConditionalLockRelationOid(toast, AccessExclusiveLock))
			return false;
		rel = table_open(toast, NoLock);
		indexes = list_concat(indexes, RelationGetIndexList(rel));
		table_close(rel, NoLock);
	}
	foreach(lc, indexes)
		success = success &&
			ConditionalLockRelationOid(lfirst_oid(lc), AccessExclusiveLock);
	return success;
}

/*
 * sealed -> empty, if it has been sealed for the retention and the rows say
 * the same.
 */
static bool
empty(const IdemStore *store, int generation, const IdemStoreState *state,
	  const IdemSeal *note)
{
	Oid			partition = store->part[generation].relid;
	int64		retention = state->retention * USECS_PER_SEC;
	TimestampTz cutoff = GetCurrentTimestamp() - retention;
	IdemStateValue values[5];
	Relation	rel;
	bool		older;

	if (note->sealed_at > cutoff)
		return false;

	/* The long part, which may have to read what the BRIN index lacks */
	if (exists_row(partition, NOT_OLDER, cutoff))
		return false;

	/* Not worth a lock as long as it is clear that it will not do */
	rel = table_open(partition, AccessShareLock);
	older = older_snapshot_exists(rel, note->next_xid);
	table_close(rel, AccessShareLock);
	if (older || !lock_for_truncate(partition))
		return false;
	rel = table_open(partition, NoLock);
	older = older_snapshot_exists(rel, note->next_xid) ||
		rel->rd_rel->relfilenode != note->relfile;
	table_close(rel, NoLock);
	if (older)
		return false;

	cutoff = GetCurrentTimestamp() - retention;
	if (note->sealed_at > cutoff ||
		exists_row(partition, OPEN_LEASE " OR " NOT_OLDER, cutoff))
		return false;

	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	if (SPI_execute(psprintf("TRUNCATE ONLY %s", idem_store_name(partition)),
					false, 0) != SPI_OK_UTILITY)
		elog(ERROR, "could not truncate %s", idem_store_name(partition));
	SPI_finish();

	erase_seal(generation, values);
	values[3] = (IdemStateValue)
	{
		"watermark", TimestampTzGetDatum(Max(cutoff, state->watermark)),
			TIMESTAMPTZOID, false
	};
	values[4] = (IdemStateValue)
	{
		"generations_expired", Int64GetDatum(state->emptied + 1), INT8OID, false
	};
	note_step(store->relid, values, 5);
	return true;
}

/*
 * Is a transaction open that writes to the partition?  Its lock conflicts
 * with SHARE but, unlike VACUUM's, not with SHARE UPDATE EXCLUSIVE.
 */
static bool
has_writer(Oid partition)
{
	if (ConditionalLockRelationOid(partition, ShareLock))
	{
		UnlockRelationOid(partition, ShareLock);
		return false;
	}
	if (!ConditionalLockRelationOid(partition, ShareUpdateExclusiveLock))
		return false;
	UnlockRelationOid(partition, ShareUpdateExclusiveLock);
	return true;
}

/*
 * Do the step for a generation that is not current.
 *
 * A sealed one normally has no writers but those that take a record out.  If
 * bookkeeping was tampered with, or rows are copied in by hand, what an open
 * transaction writes there when it would be emptied may be committed late: it
 * is sealed again after that.  Rows that were copied in and committed before
 * count from their completed_at.
 */
static bool
advance(const IdemStore *store, int generation, const IdemStoreState *state)
{
	Oid			partition = store->part[generation].relid;
	int64		blocks = partition_blocks(partition);
	Relation	rel;
	Oid			relfile;
	IdemSeal	note;

	if (blocks <= 0)
		return false;
	rel = table_open(partition, AccessShareLock);
	relfile = rel->rd_rel->relfilenode;
	table_close(rel, AccessShareLock);
	idem_state_read_seal(store->relid, generation, &note);
	if (note.known && note.relfile == relfile)
	{
		IdemStateValue values[3];

		if (note.sealed_at > GetCurrentTimestamp() -
			state->retention * USECS_PER_SEC || !has_writer(partition))
			return empty(store, generation, state, &note);
		erase_seal(generation, values);
		note_step(store->relid, values, 3);
		return true;
	}

	if (exists_row(partition, OPEN_LEASE " AND $1 IS NOT NULL", 0))
		return carry_over_leases(store->relid, generation);
	return seal(store, generation);
}

/*
 * Is the store, or a partition of it, the target of a logical subscription?
 * Then the publisher decides what is here, and nothing must be taken away
 * that is still being replicated.
 */
static bool
is_subscribed(const IdemStore *store)
{
	Relation	rel = table_open(SubscriptionRelRelationId, AccessShareLock);
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		found = false;

	scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	while (!found && HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_subscription_rel row =
			(Form_pg_subscription_rel) GETSTRUCT(tuple);
		Oid			target = row->srrelid;

		found = target == store->relid;
		for (int i = 0; i < store->nparts; i++)
			found |= target == store->part[i].relid;
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return found;
}

/*
 * Do one step of expiry of a store that is due and possible now, if there is
 * one.  To be called in a transaction of its own, until it returns false.
 */
bool
idem_expiry_step(Oid relid, IdemExpiryRound *round)
{
	IdemStore  *store;
	IdemStoreState state;

	if (!idem_state_lock(relid, false))
		return false;
	store = idem_store_open_unchecked(relid, RowExclusiveLock);
	idem_state_read(relid, &state);
	if (!state.expires || is_subscribed(store))
		return false;
	if (state.current >= store->nparts)
		state.current = 0;

	if (flip(store, &state))
		return true;
	for (int i = 1; i < store->nparts; i++)
	{
		int			generation = (state.current + i) % store->nparts;

		if (round->tried[generation])
			continue;
		round->tried[generation] = true;	/* also if it fails */
		round->ntried++;
		if (advance(store, generation, &state))
		{
			round->tried[generation] = false;
			round->ntried--;
		}
		/* Whatever it has locked goes with the transaction */
		return true;
	}
	return false;
}
