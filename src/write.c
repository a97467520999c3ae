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
 * A plain partition (see structure.c) is written to directly by table and index
 * access methods; that is the common case.  Where there are triggers,
 * constraints, columns or indexes of the owner's, and for every update and
 * delete, the executor's simple-relation path does what an SQL statement
 * would have done.  There a trigger can swallow the row, so afterwards it is
 * looked up: a completion that is not there is an error, never a success.
 *
 * A unique violation of the key's index, or a record that has appeared in
 * another generation, can only come from a row that was not written under
 * the key's lock.  The operation may have been done by somebody else, so
 * this is a serialization failure: roll back and ask again.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/sysattr.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "catalog/pg_collation.h"
#include "commands/trigger.h"
#include "executor/executor.h"
#include "executor/tuptable.h"
#include "nodes/execnodes.h"
#include "nodes/makefuncs.h"
#include "rewrite/rewriteHandler.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "answer.h"
#include "compat.h"
#include "idem.h"
#include "record.h"
#include "store.h"
#include "wait.h"
#include "write.h"

/* What the executor needs to change rows of one partition */
typedef struct WriteState
{
	EState	   *estate;
	ResultRelInfo *rri;
	EPQState	epqstate;
	TupleTableSlot *slot;
	TupleTableSlot *oldslot;
} WriteState;

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
 * Put our columns into a slot of the partition, beside what it holds.
 */
static void
set_columns(TupleTableSlot *slot, const IdemPartition *part, int generation,
			const IdemRecord *record)
{
	for (int c = 0; c < IDEM_NCOLUMNS; c++)
	{
		slot->tts_values[part->attnum[c] - 1] = record->values[c];
		slot->tts_isnull[part->attnum[c] - 1] = record->nulls[c];
	}
	slot->tts_values[part->attnum[IDEM_GENERATION] - 1] =
		Int16GetDatum(generation);
	slot->tts_isnull[part->attnum[IDEM_GENERATION] - 1] = false;
}

/*
 * Insert one index entry of a row just stored.
 */
static void
insert_index_entry(Relation heap, Oid indexid, Datum value, bool isnull,
				   ItemPointer tid, IndexUniqueCheck unique)
{
	Relation	index;
	IndexInfo  *info;

	if (!OidIsValid(indexid))
		return;
	index = index_open(indexid, RowExclusiveLock);
	info = BuildIndexInfo(index);
	index_insert(index, &value, &isnull, tid, heap, unique, false, info);
	idem_index_insert_cleanup(index, info);
	index_close(index, RowExclusiveLock);
}

/*
 * The index entries of a row just stored in a plain partition.
 */
static void
insert_index_entries(Relation heap, const IdemPartition *part,
					 const IdemRecord *record, ItemPointer tid)
{
	const Datum *values = record->values;
	const bool *nulls = record->nulls;

	insert_index_entry(heap, part->key_index, values[IDEM_KEY], false, tid,
					   UNIQUE_CHECK_YES);
	insert_index_entry(heap, part->time_index, values[IDEM_COMPLETED_AT],
					   nulls[IDEM_COMPLETED_AT], tid, UNIQUE_CHECK_NO);
	if (record->status == IDEM_LEASED)
		insert_index_entry(heap, part->lease_index, values[IDEM_LEASE_UNTIL],
						   nulls[IDEM_LEASE_UNTIL], tid, UNIQUE_CHECK_NO);
}

/*
 * A slot that holds nothing but our columns.
 */
static TupleTableSlot *
make_slot(Relation heap, const IdemPartition *part, int generation,
		  const IdemRecord *record)
{
	TupleTableSlot *slot = MakeSingleTupleTableSlot(RelationGetDescr(heap),
													&TTSOpsVirtual);

	ExecClearTuple(slot);
	memset(slot->tts_isnull, true, slot->tts_tupleDescriptor->natts);
	set_columns(slot, part, generation, record);
	ExecStoreVirtualTuple(slot);
	return slot;
}

/*
 * Insert into a plain partition: one heap tuple and its index entries.
 */
static void
insert_directly(Relation heap, const IdemPartition *part, int generation,
				IdemRecord *record)
{
	TupleTableSlot *slot = make_slot(heap, part, generation, record);

	simple_table_tuple_insert(heap, slot);
	insert_index_entries(heap, part, record, &slot->tts_tid);
	record->generation = generation;
	record->tid = slot->tts_tid;
	ExecDropSingleTupleTableSlot(slot);
}

/*
 * Update a row of a plain partition that this transaction has written.
 */
static void
update_directly(Relation heap, const IdemPartition *part, int generation,
				ItemPointer tid, const IdemRecord *record)
{
	TupleTableSlot *slot = make_slot(heap, part, generation, record);
	TU_UpdateIndexes which;

	simple_table_tuple_update(heap, tid, slot, GetActiveSnapshot(), &which);
	if (which == TU_All)
		insert_index_entries(heap, part, record, &slot->tts_tid);
	else if (which != TU_None)
		insert_index_entry(heap, part->time_index,
						   record->values[IDEM_COMPLETED_AT],
						   record->nulls[IDEM_COMPLETED_AT], &slot->tts_tid,
						   UNIQUE_CHECK_NO);
	ExecDropSingleTupleTableSlot(slot);
}

/*
 * Set up the executor for changing rows of "heap"; the caller holds a lock
 * that allows it.
 */
static void
begin_write(WriteState *ws, Relation heap)
{
	RangeTblEntry *rte = makeNode(RangeTblEntry);
	Bitmapset  *all = NULL;

	/* for triggers on UPDATE OF a column: any of them may have changed */
	for (int i = 1; i <= RelationGetNumberOfAttributes(heap); i++)
		all = bms_add_member(all, i - FirstLowInvalidHeapAttributeNumber);

	ws->estate = CreateExecutorState();
	rte->rtekind = RTE_RELATION;
	rte->relid = RelationGetRelid(heap);
	rte->relkind = heap->rd_rel->relkind;
	rte->rellockmode = RowExclusiveLock;
	idem_init_range_table(ws->estate, rte, all);

	ws->rri = makeNode(ResultRelInfo);
	InitResultRelInfo(ws->rri, heap, 1, NULL, 0);
	ws->estate->es_opened_result_relations =
		lappend(ws->estate->es_opened_result_relations, ws->rri);
	ws->estate->es_output_cid = GetCurrentCommandId(true);
	ws->estate->es_snapshot = GetActiveSnapshot();
	ExecOpenIndices(ws->rri, false);
	idem_epq_init(&ws->epqstate, ws->estate);
	ws->slot = table_slot_create(heap, &ws->estate->es_tupleTable);
	ws->oldslot = table_slot_create(heap, &ws->estate->es_tupleTable);
	AfterTriggerBeginQuery();
}

/*
 * Fire the AFTER triggers, which may run any code, and clean up.
 */
static void
end_write(WriteState *ws)
{
	AfterTriggerEndQuery(ws->estate);
	EvalPlanQualEnd(&ws->epqstate);
	ExecCloseIndices(ws->rri);
	ExecResetTupleTable(ws->estate->es_tupleTable, false);
	FreeExecutorState(ws->estate);
}

/*
 * Fetch the version of the row that "old" describes, whose partition was
 * locked before it was found.
 */
static void
fetch_old(WriteState *ws, Relation heap, Oid store, text *key,
		  const IdemRecord *old)
{
	ItemPointerData tid = old->tid;
	bool		isnull;
	Datum		value;
	AttrNumber	column = get_attnum(RelationGetRelid(heap), "key");

	if (!table_tuple_fetch_row_version(heap, &tid, SnapshotAny, ws->oldslot))
		idem_raise_conflict(store, key);
	value = slot_getattr(ws->oldslot, column, &isnull);
	if (isnull || !DatumGetBool(DirectFunctionCall2Coll(texteq,
														C_COLLATION_OID,
														value,
														PointerGetDatum(key))))
		elog(ERROR, "row of an idempotency key has changed its place");
}

/*
 * Columns of the owner's start from their defaults; ours are set later.
 */
static void
set_defaults(WriteState *ws, Relation heap, const IdemPartition *part)
{
	TupleDesc	desc = RelationGetDescr(heap);
	ExprContext *econtext = GetPerTupleExprContext(ws->estate);

	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);
		bool		ours = att->attisdropped || att->attgenerated != '\0';
		Node	   *expr;

		ws->slot->tts_values[i] = (Datum) 0;
		ws->slot->tts_isnull[i] = true;
		for (int c = 0; !ours && c < IDEM_NCOLUMNS; c++)
			ours = part->attnum[c] == att->attnum;
		expr = ours ? NULL : build_column_default(heap, i + 1);
		if (expr != NULL)
			ws->slot->tts_values[i] =
				ExecEvalExpr(ExecPrepareExpr((Expr *) expr, ws->estate),
							 econtext, &ws->slot->tts_isnull[i]);
	}
}

/*
 * Columns of the owner's are carried over from the old row, by name, since
 * partitions can differ in their column numbers.
 */
static void
carry_over(WriteState *ws, TupleTableSlot *from)
{
	TupleDesc	to_desc = ws->slot->tts_tupleDescriptor;
	TupleDesc	from_desc = from->tts_tupleDescriptor;

	slot_getallattrs(from);
	for (int i = 0; i < to_desc->natts; i++)
	{
		Form_pg_attribute to = TupleDescAttr(to_desc, i);

		if (to->attisdropped || to->attgenerated != '\0')
			continue;
		for (int j = 0; j < from_desc->natts; j++)
		{
			Form_pg_attribute att = TupleDescAttr(from_desc, j);

			if (att->attisdropped || att->atttypid != to->atttypid ||
				strcmp(NameStr(att->attname), NameStr(to->attname)) != 0)
				continue;
			ws->slot->tts_values[i] = from->tts_values[j];
			ws->slot->tts_isnull[i] = from->tts_isnull[j];
			break;
		}
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
 * Delete the row that "old" describes, of a partition that is locked, from
 * its generation and return it.
 */
static TupleTableSlot *
take_out(IdemStore *store, text *key, const IdemRecord *old)
{
	Oid			relid = store->part[old->generation].relid;
	Relation	heap;
	WriteState	ws;
	TupleDesc	desc;
	TupleTableSlot *taken;

	heap = table_open(relid, NoLock);
	desc = CreateTupleDescCopy(RelationGetDescr(heap));
	taken = MakeSingleTupleTableSlot(desc, &TTSOpsVirtual);
	begin_write(&ws, heap);
	fetch_old(&ws, heap, store->relid, key, old);
	ExecCopySlot(taken, ws.oldslot);
	ExecSimpleRelationDelete(ws.rri, ws.estate, &ws.epqstate, ws.oldslot);
	end_write(&ws);
	table_close(heap, NoLock);
	CommandCounterIncrement();
	return taken;
}

/*
 * Put a record into the current generation with the executor's help: a new
 * one, or the successor of "old", which is updated where it is or, from
 * another generation, moved.
 */
static void
write_with_executor(IdemStore *store, Relation heap, text *key,
					const IdemRecord *old, const IdemRecord *record)
{
	const IdemPartition *part = &store->part[store->current];
	bool		in_place = old != NULL && old->generation == store->current;
	WriteState	to;

	begin_write(&to, heap);
	ExecClearTuple(to.slot);
	if (old == NULL)
		set_defaults(&to, heap, part);
	else
		memset(to.slot->tts_isnull, true, to.slot->tts_tupleDescriptor->natts);
	if (in_place)
	{
		fetch_old(&to, heap, store->relid, key, old);
		carry_over(&to, to.oldslot);
	}
	else if (old != NULL)
		carry_over(&to, take_out(store, key, old));
	set_columns(to.slot, part, store->current, record);
	ExecStoreVirtualTuple(to.slot);
	ExecMaterializeSlot(to.slot);

	if (in_place)
		ExecSimpleRelationUpdate(to.rri, to.estate, &to.epqstate, to.oldslot,
								 to.slot);
	else
		ExecSimpleRelationInsert(to.rri, to.estate, to.slot);
	end_write(&to);
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
		(void) take_out(*store, key, record);
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
			insert_directly(heap, part, store->current, record);
		else
			write_with_executor(store, heap, key, old, record);
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
 * Is the row at "tid" one of "key" that this transaction has written and not
 * changed since?  If so, *attempts is what it says.
 */
static bool
is_own_row(Relation heap, const IdemPartition *part, ItemPointer tid,
		   text *key, Datum *attempts)
{
	TupleTableSlot *slot = table_slot_create(heap, NULL);
	bool		own = false;
	bool		isnull;

	/* The transaction may have truncated or rewritten the partition since */
	if (ItemPointerGetBlockNumber(tid) < RelationGetNumberOfBlocks(heap) &&
		table_tuple_fetch_row_version(heap, tid, SnapshotSelf, slot))
	{
		bool		xmin_isnull;
		Datum		xmin = slot_getsysattr(slot, MinTransactionIdAttributeNumber,
										   &xmin_isnull);
		Datum		value = slot_getattr(slot, part->attnum[IDEM_KEY], &isnull);

		own = !isnull &&
			TransactionIdIsCurrentTransactionId(DatumGetTransactionId(xmin)) &&
			DatumGetBool(DirectFunctionCall2Coll(texteq, C_COLLATION_OID, value,
												 PointerGetDatum(key)));
		*attempts = slot_getattr(slot, part->attnum[IDEM_ATTEMPTS], &isnull);
		if (isnull)
			*attempts = Int32GetDatum(0);
	}
	ExecDropSingleTupleTableSlot(slot);
	return own;
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
	own = is_own_row(heap, part, tid, key, &attempts);
	if (own)
	{
		idem_record_set(record, IDEM_ATTEMPTS,
						Int32GetDatum(DatumGetInt32(attempts) + 1), false);
		/* An own row is changed by a later command than made it */
		CommandCounterIncrement();
		if (!idem_key_lock(tag))
			(void) idem_key_lock_wait(tag, DT_NOEND);
		update_directly(heap, part, generation, tid, record);
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
