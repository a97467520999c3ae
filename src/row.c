/*-------------------------------------------------------------------------
 *
 * row.c
 *	  Put a row into a partition of a store, in the place of another, or take
 *	  it out.
 *
 * A plain partition (see structure.c) is written to directly, by table and
 * index access methods; that is the common case.  Where there are triggers,
 * constraints, columns or indexes of the owner's, for every delete, and for
 * updates of rows that another transaction has written, the executor's
 * simple-relation path does what an SQL statement would have done.
 *
 * The caller holds a lock on the partition that allows it, to the end of the
 * (sub)transaction; see write.c, which also says what to make of a unique
 * violation, and looks whether a trigger has swallowed the row.
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
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "answer.h"
#include "compat.h"
#include "record.h"
#include "row.h"
#include "store.h"

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
void
idem_row_insert(Relation heap, const IdemPartition *part, int generation,
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
void
idem_row_update(Relation heap, const IdemPartition *part, int generation,
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
 * Is the row at "tid" one of "key" that this transaction has written and not
 * changed since?  If so, *attempts is what it says.
 */
bool
idem_row_is_own(Relation heap, const IdemPartition *part, ItemPointer tid,
				text *key, Datum *attempts)
{
	TupleTableSlot *slot = table_slot_create(heap, NULL);
	bool		own = false;
	bool		isnull;

	/* The transaction may have truncated or rewritten the partition since */
	if (ItemPointerGetBlockNumber(tid) < RelationGetNumberOfBlocks(heap) &&
		table_tuple_fetch_row_version(heap, tid, SnapshotSelf, slot))
	{
		Datum		xmin;
		Datum		value;

		xmin = slot_getsysattr(slot, MinTransactionIdAttributeNumber, &isnull);
		value = slot_getattr(slot, part->attnum[IDEM_KEY], &isnull);
		own = !isnull &&
			TransactionIdIsCurrentTransactionId(DatumGetTransactionId(xmin)) &&
			DatumGetBool(DirectFunctionCall2Coll(texteq, C_COLLATION_OID,
												 value,
												 PointerGetDatum(key)));
		*attempts = slot_getattr(slot, part->attnum[IDEM_ATTEMPTS], &isnull);
		if (isnull)
			*attempts = Int32GetDatum(0);
	}
	ExecDropSingleTupleTableSlot(slot);
	return own;
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
 * Delete the row that "old" describes, of a partition that is locked, from
 * its generation and return it.
 */
TupleTableSlot *
idem_row_take_out(IdemStore *store, text *key, const IdemRecord *old)
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
void
idem_row_write(IdemStore *store, Relation heap, text *key,
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
		carry_over(&to, idem_row_take_out(store, key, old));
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
