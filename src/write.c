/*-------------------------------------------------------------------------
 *
 * write.c
 *	  Write, replace and delete records of a store.
 *
 * A record is written into the generation that is current at that moment.
 * For each row the writer takes RowExclusiveLock on the partition, charged
 * to the current (sub)transaction: it lives as long as the row may, so that
 * whoever later gets a conflicting lock on a generation knows that nothing
 * more will appear there.  A portal's lock would go with a failed cursor,
 * whose row stays.  With the lock held, invalidations are accepted and the
 * current generation is asked for again, until both agree.
 *
 * How the row gets there is row.c's business.  Where triggers run, one can
 * swallow the row, so afterwards it is looked up: a completion that is not
 * there is an error, never a success.
 *
 * A unique violation of the key's index, or a record that has appeared in
 * another generation, can only come from a row that was not written under
 * the key's lock.  The operation may have been done by somebody else, so
 * this is a serialization failure: roll back and ask again.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "access/xact.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/resowner.h"

#include "answer.h"
#include "idem.h"
#include "record.h"
#include "row.h"
#include "store.h"
#include "wait.h"
#include "write.h"

/*
 * Lock or unlock a partition for writing on behalf of the current
 * (sub)transaction.
 */
static void
partition_lock(Oid relid, bool acquire)
{
	ResourceOwner oldowner = CurrentResourceOwner;

	CurrentResourceOwner = CurTransactionResourceOwner;
	PG_TRY();
	{
		if (acquire)
			LockRelationOid(relid, RowExclusiveLock);
		else
			UnlockRelationOid(relid, RowExclusiveLock);
	}
	PG_FINALLY();
	{
		CurrentResourceOwner = oldowner;
	}
	PG_END_TRY();
}

/*
 * Lock the current generation for writing and return the description of the
 * store that says so.  "store" is freed if it had become stale.
 *
 * A generation that stops being current between this and the insert does no
 * harm: it cannot be sealed, let alone emptied, while the lock is held.
 */
static IdemStore *
lock_current_generation(IdemStore *store)
{
	for (;;)
	{
		Oid			relid = store->part[store->current].relid;

		partition_lock(relid, true);
		store = idem_store_refresh(store);
		if (store->part[store->current].relid == relid)
			return store;
		partition_lock(relid, false);
	}
}

/*
 * Find a record again with its partition locked for writing: until then
 * VACUUM FULL and the like can move the row, and something else may stand in
 * its place.  The key's lock, or the row being our own, keeps its content.
 */
static void
find_locked(IdemStore **store, text *key, IdemRecord *record)
{
	int			status = record->status;
	int			generation;

	do
	{
		generation = record->generation;
		partition_lock((*store)->part[generation].relid, true);
		*store = idem_store_refresh(*store);
		idem_record_find(store, key, record);
		if (!record->found || record->status != status ||
			TransactionIdIsValid(record->in_flux))
			idem_raise_conflict((*store)->relid, key);
	} while (record->generation != generation);
}

/*
 * Delete the record of "key" until it stands only "keep" times; rows that
 * were copied in by hand can make it stand more than once.  The caller holds
 * the key's lock.  *record, as found, is found again.
 */
void
idem_record_delete(IdemStore **store, text *key, IdemRecord *record, int keep)
{
	while (record->count > keep)
	{
		int			count = record->count;

		/* An own row is changed by a later command than made it */
		CommandCounterIncrement();
		find_locked(store, key, record);
		(void) idem_row_take_out(*store, key, record);
		*store = idem_store_refresh(*store);
		idem_record_find(store, key, record);
		if (record->count >= count)
			ereport(ERROR,
					(errcode(ERRCODE_TRIGGERED_ACTION_EXCEPTION),
					 errmsg("record of an idempotency key was not deleted"),
					 errdetail("The key is \"%s\" in store %s.",
							   text_to_cstring(key),
							   idem_store_name((*store)->relid)),
					 errhint("A trigger of the store suppresses the deletion; remove it.")));
	}
}

/*
 * Was this unique violation raised by the key's index?  Only an error that
 * says so itself may make us look at a catalog here.
 */
static bool
is_key_violation(ErrorData *edata, Relation heap, const IdemPartition *part)
{
	char	   *index;
	char	   *schema;

	if (edata->sqlerrcode != ERRCODE_UNIQUE_VIOLATION ||
		edata->constraint_name == NULL || edata->table_name == NULL ||
		edata->schema_name == NULL)
		return false;
	index = get_rel_name(part->key_index);
	schema = get_namespace_name(RelationGetNamespace(heap));
	return index != NULL && schema != NULL &&
		strcmp(edata->constraint_name, index) == 0 &&
		strcmp(edata->table_name, RelationGetRelationName(heap)) == 0 &&
		strcmp(edata->schema_name, schema) == 0;
}

/*
 * After a write that could have run triggers: the record must stand there as
 * it was meant to, once, and written by this transaction.  A trigger may have
 * changed other columns; *meant becomes what is stored.
 *
 * Where nothing was replaced, a record of somebody else's came meanwhile.
 */
static void
verify(IdemStore *store, text *key, bool replaced, IdemRecord *meant)
{
	IdemRecord	record;

	idem_record_find(&store, key, &record);
	if (TransactionIdIsValid(record.in_flux) ||
		(record.foreign > 0 && !replaced))
		idem_raise_conflict(store->relid, key);
	if (record.count != 1 || !record.own || record.status != meant->status)
		ereport(ERROR,
				(errcode(ERRCODE_TRIGGERED_ACTION_EXCEPTION),
				 errmsg("record of an idempotency key was not stored"),
				 errdetail("The key is \"%s\" in store %s.",
						   text_to_cstring(key), idem_store_name(store->relid)),
				 errhint("A trigger or rule of the store suppresses or changes rows; remove it.")));
	*meant = record;
}

/*
 * Put the record there; false if a row of the same key was in the way.  That
 * always becomes an error, so nothing of the failed insert is ever used.
 */
static bool
put(IdemStore *store, Relation heap, text *key, const IdemRecord *old,
	IdemRecord *record)
{
	MemoryContext context = CurrentMemoryContext;
	const IdemPartition *part = &store->part[store->current];
	volatile bool success = true;

	PG_TRY();
	{
		if (part->plain && old == NULL)
			idem_row_insert(heap, part, store->current, record);
		else
			idem_row_write(store, heap, key, old, record);
	}
	PG_CATCH();
	{
		ErrorData  *edata;

		MemoryContextSwitchTo(context);
		edata = CopyErrorData();
		if (!is_key_violation(edata, heap, part))
			PG_RE_THROW();
		FlushErrorState();
		success = false;
	}
	PG_END_TRY();
	return success;
}

/*
 * Write "record", with the current generation locked; the end of the two
 * functions below.
 */
static void
write_record(IdemStore *store, text *key, const IdemRecord *old,
			 IdemRecord *record)
{
	const IdemPartition *part = &store->part[store->current];
	Relation	heap = table_open(part->relid, NoLock);

	if (!put(store, heap, key, old, record))
		idem_raise_conflict(store->relid, key);
	table_close(heap, NoLock);

	if (!part->plain || old != NULL)
	{
		CommandCounterIncrement();
		verify(store, key, old != NULL, record);
	}
}

/*
 * Lock the current generation, which will take the record of "key", and look
 * into all but that, or "but", for one that came since the caller looked.
 */
static IdemStore *
lock_and_look_again(IdemStore *store, text *key, int but)
{
	TransactionId in_flux;
	int			current;

	do
	{
		store = lock_current_generation(store);
		current = store->current;
		if (idem_record_appeared(&store, key, but == -1 ? current : but,
								 &in_flux))
			idem_raise_conflict(store->relid, key);
		if (TransactionIdIsValid(in_flux))
			(void) idem_xact_wait(in_flux, DT_NOEND);
	} while (TransactionIdIsValid(in_flux) || store->current != current);
	return store;
}

/*
 * Insert the record of a key that has none.  The caller holds the key's lock
 * and has looked; with "look_again", not just now.
 *
 * All of record->values but the generation and record->status are set by the
 * caller; afterwards *record is what is stored.  "store" may be freed: do not
 * use it afterwards.
 */
void
idem_record_insert(IdemStore *store, text *key, bool look_again,
				   IdemRecord *record)
{
	store = look_again ? lock_and_look_again(store, key, -1) :
		lock_current_generation(store);
	write_record(store, key, NULL, record);
}

/*
 * Write "record" in the place of the row of "key" that this transaction has
 * inserted at "tid" into "generation", under the key's lock; the partition has
 * been locked since.  False, and nothing done, if that is not to be done
 * directly, or the row is not what it was.  *store is replaced if it has
 * changed.
 */
bool
idem_record_update_own(IdemStore **store, text *key, const LOCKTAG *tag,
					   int generation, ItemPointer tid, IdemRecord *record)
{
	const IdemPartition *part;
	Relation	heap;
	Datum		attempts;
	bool		own;

	*store = lock_and_look_again(*store, key, generation);
	part = &(*store)->part[generation];
	if ((*store)->current != generation || !part->plain)
		return false;

	heap = table_open(part->relid, NoLock);
	own = idem_row_is_own(heap, part, tid, key, &attempts);
	if (own)
	{
		idem_record_set(record, IDEM_ATTEMPTS,
						Int32GetDatum(DatumGetInt32(attempts) + 1), false);
		/* An own row is changed by a later command than made it */
		CommandCounterIncrement();
		if (!idem_key_lock(tag))
			(void) idem_key_lock_wait(tag, DT_NOEND);
		idem_row_update(heap, part, generation, tid, record);
		idem_key_unlock(tag);
	}
	table_close(heap, NoLock);
	return own;
}

/*
 * Write the record of "key" in the place of "old", likewise.  The caller
 * holds the key's lock, or "old" is an uncommitted row of its own.
 */
void
idem_record_replace(IdemStore *store, text *key, IdemRecord *old,
					IdemRecord *record)
{
	idem_record_delete(&store, key, old, 1);
	/* An own row is changed by a later command than made it */
	CommandCounterIncrement();
	find_locked(&store, key, old);
	store = lock_current_generation(store);
	write_record(store, key, old, record);
}
