/*-------------------------------------------------------------------------
 *
 * structure.c
 *	  What makes a table a store.
 *
 * A store is known by its structure, not by who made it: a permanent table,
 * list-partitioned by "generation" into heap partitions 0 .. N-1, with the
 * columns of idem_completion, and in each partition a valid, unique,
 * immediate index on "key" that compares bytes.  Anything less could hide a
 * record from a look-up, so it is refused.
 *
 * N is not stored anywhere that could be lost: the CHECK constraint made by
 * idem_create_store() names it, and where it does the partitions must match.
 * A ring without its last partition would else look like a smaller ring.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/table.h"
#include "catalog/pg_am.h"
#include "catalog/pg_class.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_index.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_opfamily.h"
#include "catalog/pg_type.h"
#include "nodes/nodeFuncs.h"
#include "partitioning/partbounds.h"
#include "partitioning/partdesc.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/partcache.h"
#include "utils/rel.h"

#include "compat.h"
#include "key.h"
#include "store.h"

static const struct
{
	const char *name;
	Oid			type;
}			columns[IDEM_NCOLUMNS] =
{
	[IDEM_KEY] = {"key", TEXTOID},
	[IDEM_STATUS] = {"status", TEXTOID},
	[IDEM_ATTEMPTS] = {"attempts", INT4OID},
	[IDEM_TOKEN] = {"token", INT8OID},
	[IDEM_CLAIMED_AT] = {"claimed_at", TIMESTAMPTZOID},
	[IDEM_COMPLETED_AT] = {"completed_at", TIMESTAMPTZOID},
	[IDEM_LEASE_UNTIL] = {"lease_until", TIMESTAMPTZOID},
	[IDEM_CLAIMED_BY] = {"claimed_by", TEXTOID},
	[IDEM_FINGERPRINT] = {"fingerprint", UUIDOID},
	[IDEM_CHECKPOINT] = {"checkpoint", JSONBOID},
	[IDEM_RESULT] = {"result", JSONOID},
	[IDEM_GENERATION] = {"generation", INT2OID},
};

PG_FUNCTION_INFO_V1(idem_check);

/* As stored, by IdemStatus */
static const char *const status_names[] = {
	[IDEM_COMPLETED] = "completed",
	[IDEM_LEASED] = "leased",
	[IDEM_SKIPPED] = "skipped",
	[IDEM_RELEASED] = "released",
};

const char *
idem_status_name(IdemStatus status)
{
	return status_names[status];
}

IdemStatus
idem_status_from_text(const text *status)
{
	size_t		len = VARSIZE_ANY_EXHDR(status);

	for (int i = IDEM_COMPLETED; i <= IDEM_RELEASED; i++)
		if (len == strlen(status_names[i]) &&
			memcmp(VARDATA_ANY(status), status_names[i], len) == 0)
			return (IdemStatus) i;
	return IDEM_UNKNOWN_STATUS;
}

/*
 * idem_check(key text, status text, generation smallint, generations int)
 *
 * The CHECK constraint of every store.  Direct inserts need not evaluate it:
 * idem itself never writes a row that breaks it.  The last argument is how
 * the number of generations is known from the table's structure alone.
 */
Datum
idem_check(PG_FUNCTION_ARGS)
{
	text	   *status;
	int			generation;

	/* NULLs are the business of NOT NULL, as for any other CHECK */
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1) || PG_ARGISNULL(2) ||
		PG_ARGISNULL(3))
		PG_RETURN_NULL();

	status = PG_GETARG_TEXT_PP(1);
	generation = PG_GETARG_INT16(2);

	PG_RETURN_BOOL(idem_key_is_valid(PG_GETARG_TEXT_PP(0)) &&
				   idem_status_from_text(status) != IDEM_UNKNOWN_STATUS &&
				   generation >= 0 && generation < PG_GETARG_INT32(3));
}

static void
refuse(Oid relid, const char *why)
{
	ereport(ERROR,
			(errcode(ERRCODE_WRONG_OBJECT_TYPE),
			 errmsg("\"%s\" cannot be used as a store", get_rel_name(relid)),
			 errdetail_internal("%s", why),
			 errhint("Create stores with idem_create_store().")));
}

/*
 * Is "expr" idem's own CHECK?  If so, *generations is set where it names a
 * number of them.
 */
static bool
is_own_check(const char *expr_string, int *generations)
{
	FuncExpr   *expr = (FuncExpr *) stringToNode(expr_string);
	FmgrInfo	flinfo;
	Const	   *last;

	if (!IsA(expr, FuncExpr) || list_length(expr->args) != 4)
		return false;
	fmgr_info(expr->funcid, &flinfo);
	if (flinfo.fn_addr != idem_check)
		return false;
	last = (Const *) lfourth(expr->args);
	if (IsA(last, Const) && !last->constisnull)
		*generations = DatumGetInt32(last->constvalue);
	return true;
}

/*
 * Is the index predicate status = 'leased'?
 */
static bool
is_lease_predicate(Relation index, AttrNumber status)
{
	List	   *predicate = RelationGetIndexPredicate(index);
	OpExpr	   *op;
	Node	   *left;
	Const	   *right;

	if (list_length(predicate) != 1)
		return false;
	op = linitial(predicate);
	if (!IsA(op, OpExpr) || get_opcode(op->opno) != F_TEXTEQ)
		return false;
	left = linitial(op->args);
	right = lsecond(op->args);
	return IsA(left, Var) && ((Var *) left)->varattno == status &&
		IsA(right, Const) && !right->constisnull &&
		strcmp(TextDatumGetCString(right->constvalue), "leased") == 0;
}

/*
 * Find the columns of idem_completion in "rel", which is a store (root is
 * its own oid) or a partition of it.  Returns how many others there are.
 */
static int
find_columns(Relation rel, Oid root, AttrNumber *attnum)
{
	TupleDesc	desc = RelationGetDescr(rel);
	int			others = 0;
	int			found = 0;

	memset(attnum, 0, sizeof(AttrNumber) * IDEM_NCOLUMNS);
	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);
		int			c;

		if (att->attisdropped)
			continue;
		for (c = 0; c < IDEM_NCOLUMNS; c++)
			if (strcmp(NameStr(att->attname), columns[c].name) == 0)
				break;
		if (c == IDEM_NCOLUMNS)
		{
			others++;
			continue;
		}
		if (att->atttypid != columns[c].type || att->attgenerated != '\0')
			refuse(root, psprintf("The type of its column \"%s\" is not that of idem_completion.",
								  columns[c].name));
		attnum[c] = att->attnum;
		found++;
	}
	if (found != IDEM_NCOLUMNS)
		refuse(root, "It does not have all columns of idem_completion.");
	if (TupleDescAttr(desc, attnum[IDEM_KEY] - 1)->attcollation !=
		C_COLLATION_OID)
		refuse(root, "The collation of its column \"key\" is not \"C\".");
	return others;
}

/*
 * Look at the indexes of a partition.  Returns whether all of them are of
 * the three kinds that a direct insert knows how to fill.
 */
static bool
find_indexes(Relation rel, Oid root, IdemPartition *part)
{
	bool		all_known = true;
	List	   *indexes = RelationGetIndexList(rel);
	ListCell   *lc;

	foreach(lc, indexes)
	{
		Relation	index = index_open(lfirst_oid(lc), AccessShareLock);
		Form_pg_index form = index->rd_index;
		AttrNumber	column = form->indkey.values[0];
		bool		simple = form->indnkeyatts == 1 &&
			form->indisready && form->indisvalid &&
			RelationGetIndexExpressions(index) == NIL;
		bool		total = RelationGetIndexPredicate(index) == NIL;
		bool		btree = index->rd_rel->relam == BTREE_AM_OID;

		if (simple && total && btree &&
			column == part->attnum[IDEM_KEY] &&
			form->indisunique && form->indimmediate &&
			index->rd_opfamily[0] == TEXT_BTREE_FAM_OID &&
			index->rd_indcollation[0] == C_COLLATION_OID &&
			!OidIsValid(part->key_index))
		{
			part->key_index = RelationGetRelid(index);
			if (form->indnatts != 1)
				all_known = false;
		}
		else if (simple && total && form->indnatts == 1 &&
				 index->rd_rel->relam == BRIN_AM_OID &&
				 column == part->attnum[IDEM_COMPLETED_AT] &&
				 !OidIsValid(part->time_index))
			part->time_index = RelationGetRelid(index);
		else if (simple && !total && form->indnatts == 1 && btree &&
				 !form->indisunique &&
				 column == part->attnum[IDEM_LEASE_UNTIL] &&
				 is_lease_predicate(index, part->attnum[IDEM_STATUS]) &&
				 !OidIsValid(part->lease_index))
			part->lease_index = RelationGetRelid(index);
		else
			all_known = false;
		index_close(index, AccessShareLock);
	}
	list_free(indexes);

	if (!OidIsValid(part->key_index))
		refuse(root, psprintf("Its partition \"%s\" has no valid, unique, immediate index on \"key\" with collation \"C\".",
							  RelationGetRelationName(rel)));
	return all_known;
}

/*
 * Check one partition and describe it.
 *
 * It is "plain" if a row can be put there or updated by the table and index
 * access methods alone, skipping nothing that the executor would have done: no
 * row trigger on INSERT or UPDATE, no constraint but idem's own, no column of
 * the owner's, and only the three kinds of indexes that are known.
 */
static void
describe_partition(Oid relid, Oid root, IdemPartition *part, int *generations)
{
	Relation	rel = table_open(relid, AccessShareLock);
	TriggerDesc *triggers;
	TupleConstr *constr;
	List	   *checks = NIL;
	ListCell   *lc;

	if (rel->rd_rel->relkind != RELKIND_RELATION ||
		rel->rd_rel->relam != HEAP_TABLE_AM_OID)
		refuse(root, psprintf("Its partition \"%s\" is not an ordinary table.",
							  RelationGetRelationName(rel)));
	if (rel->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT)
		refuse(root, psprintf("Its partition \"%s\" would lose its rows in a crash.",
							  RelationGetRelationName(rel)));

	part->relid = relid;
	part->plain = find_columns(rel, root, part->attnum) == 0;
	part->plain &= find_indexes(rel, root, part);
	/* Opening an index can rebuild what "rel" points to, so not earlier */
	triggers = rel->trigdesc;
	part->plain &= triggers == NULL ||
		!(triggers->trig_insert_before_row || triggers->trig_insert_after_row ||
		  triggers->trig_update_before_row || triggers->trig_update_after_row);

	constr = RelationGetDescr(rel)->constr;
	if (constr != NULL)
	{
		part->plain &= !constr->has_generated_stored;
		for (int i = 0; i < constr->num_check; i++)
			checks = lappend(checks, pstrdup(constr->check[i].ccbin));
	}
	foreach(lc, checks)
		if (!is_own_check(lfirst(lc), generations))
			part->plain = false;
	for (int c = 0; c < IDEM_NCOLUMNS; c++)
	{
		if (TupleDescAttr(RelationGetDescr(rel),
						  part->attnum[c] - 1)->attnotnull &&
			c != IDEM_KEY && c != IDEM_STATUS && c != IDEM_GENERATION)
			part->plain = false;
	}
	table_close(rel, AccessShareLock);
}

/*
 * With Citus, the table that is distributed must not be used as a store:
 * only its shards are, each beside the data its handlers write.  Citus keeps
 * the list of distributed tables in pg_dist_partition, on every node.
 */
static bool
is_distributed(Oid relid)
{
	Oid			catalog = get_relname_relid("pg_dist_partition",
											PG_CATALOG_NAMESPACE);
	AttrNumber	column;
	Relation	rel;
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		found = false;

	if (!OidIsValid(catalog))
		return false;
	column = get_attnum(catalog, "logicalrelid");
	if (column == InvalidAttrNumber)
		return false;

	rel = table_open(catalog, AccessShareLock);
	scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	while (!found && HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		bool		isnull;
		Datum		value = heap_getattr(tuple, column, RelationGetDescr(rel),
										 &isnull);

		found = !isnull && DatumGetObjectId(value) == relid;
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return found;
}

/*
 * Check that "relid" is a store and describe it, in the current context.
 * The caller holds a lock on it.
 */
IdemStore *
idem_store_describe(Oid relid)
{
	Relation	rel;
	PartitionKey key;
	PartitionDesc desc;
	PartitionBoundInfo bound;
	IdemStore  *store;
	AttrNumber	attnum[IDEM_NCOLUMNS];
	int			generations = -1;

	rel = RelationIdGetRelation(relid);
	if (!RelationIsValid(rel))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("store with OID %u does not exist", relid),
				 errhint("Create stores with idem_create_store().")));
	if (rel->rd_rel->relkind != RELKIND_PARTITIONED_TABLE)
		refuse(relid, "It is not a partitioned table.");
	if (rel->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT)
		refuse(relid, "It would lose its rows in a crash or at the end of the session.");
	if (is_distributed(relid))
		refuse(relid, "It is a distributed table; only its shards are stores.");

	find_columns(rel, relid, attnum);
	key = RelationGetPartitionKey(rel);
	if (key->strategy != PARTITION_STRATEGY_LIST ||
		key->partattrs[0] != attnum[IDEM_GENERATION])
		refuse(relid, "It is not partitioned by list of \"generation\".");

	/* A partition whose detaching has begun does not count */
	desc = RelationGetPartitionDesc(rel, true);
	bound = desc->boundinfo;
	if (desc->nparts < 2 || desc->nparts > IDEM_MAX_GENERATIONS)
		refuse(relid, psprintf("A store has between 2 and %d partitions, not %d.",
							   IDEM_MAX_GENERATIONS, desc->nparts));
	if (bound->null_index != -1 || bound->default_index != -1 ||
		bound->ndatums != desc->nparts)
		refuse(relid, "Each of its partitions must hold exactly one generation.");

	store = palloc0(IDEM_STORE_SIZE(desc->nparts));
	store->relid = relid;
	store->current = -1;
	store->nparts = desc->nparts;
	for (int i = 0; i < desc->nparts; i++)
	{
		if (DatumGetInt16(bound->datums[i][0]) != i)
			refuse(relid, psprintf("The partition of generation %d is missing.", i));
		describe_partition(desc->oids[bound->indexes[i]], relid,
						   &store->part[i], &generations);
	}
	if (generations != -1 && generations != desc->nparts)
		refuse(relid, psprintf("Its CHECK constraint names %d generations, but there are %d.",
							   generations, desc->nparts));
	RelationClose(rel);
	return store;
}

const char *
idem_column_name(int column)
{
	return columns[column].name;
}

Oid
idem_column_type(int column)
{
	return columns[column].type;
}
