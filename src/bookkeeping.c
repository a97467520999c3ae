/*-------------------------------------------------------------------------
 *
 * bookkeeping.c
 *	  What idem_store_state says of a store: current generation, retention.
 *
 * The table only advises.  A stale, wrong or missing row can make expiry
 * late; whether a record counts is decided by the records and by locks.
 *
 * Which row is a store's: a row remembers the database it was written in
 * ("origin").  In that database the oid decides, so that a rename is
 * harmless; anywhere else, which means after a restore, oids mean nothing
 * and the name decides.  Without a row, the default store has its defaults,
 * and any other table is not expired.
 *
 * It is always read with a snapshot taken now, never with the transaction's:
 * what counts is the state when the caller looks, at any isolation level.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xlog.h"
#include "catalog/indexing.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "partitioning/partdesc.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "bookkeeping.h"
#include "idem.h"

#define STATE_TABLE		"idem_store_state"
#define DEFAULT_STORE	"idem_completions"

/* Columns of idem_store_state that are read here */
enum
{
	STATE_STORE = 1,
	STATE_SCHEMA_NAME,
	STATE_STORE_NAME,
	STATE_ORIGIN,
	STATE_RETENTION,
	STATE_CURRENT,
	STATE_WATERMARK
};

PG_FUNCTION_INFO_V1(idem_generation);

/*
 * The schema the extension is installed in, InvalidOid if it is not (the
 * library can outlive DROP EXTENSION).
 */
Oid
idem_extension_schema(void)
{
	Oid			extension = get_extension_oid("idem", true);
	Oid			schema = InvalidOid;
	Relation	rel;
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	if (!OidIsValid(extension))
		return InvalidOid;

	rel = table_open(ExtensionRelationId, AccessShareLock);
	ScanKeyInit(&key, Anum_pg_extension_oid, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(extension));
	scan = systable_beginscan(rel, ExtensionOidIndexId, true, NULL, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
		schema = ((Form_pg_extension) GETSTRUCT(tuple))->extnamespace;
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return schema;
}

/*
 * What identifies this database for good: a clone or a restore differs.
 */
static char *
this_origin(void)
{
	return psprintf(UINT64_FORMAT "/%u", GetSystemIdentifier(), MyDatabaseId);
}

/*
 * Is this row of idem_store_state the one of "store"?
 */
static bool
is_row_of(HeapTuple tuple, TupleDesc desc, Oid store, const char *origin)
{
	Datum		values[STATE_WATERMARK + 1];
	bool		isnull;

	for (int i = STATE_STORE; i <= STATE_ORIGIN; i++)
	{
		values[i] = heap_getattr(tuple, i, desc, &isnull);
		if (isnull)
			return false;
	}
	if (strcmp(TextDatumGetCString(values[STATE_ORIGIN]), origin) == 0)
		return DatumGetObjectId(values[STATE_STORE]) == store;
	else
	{
		char	   *name = get_rel_name(store);
		char	   *schema = get_namespace_name(get_rel_namespace(store));

		return name != NULL && schema != NULL &&
			strcmp(NameStr(*DatumGetName(values[STATE_STORE_NAME])), name) == 0 &&
			strcmp(NameStr(*DatumGetName(values[STATE_SCHEMA_NAME])), schema) == 0;
	}
}

/*
 * Read what is known of "store".  Takes AccessShareLock on the bookkeeping
 * table and releases it; privileges are not asked for, since every claimer
 * needs this.
 */
void
idem_state_read(Oid store, IdemStoreState *state)
{
	Oid			schema = idem_extension_schema();
	Oid			relid = InvalidOid;
	Relation	rel;
	Snapshot	snapshot;
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		found = false;
	char	   *origin = this_origin();

	state->expires = false;
	state->current = 0;
	state->retention = 0;
	state->watermark = DT_NOBEGIN;

	if (OidIsValid(schema))
	{
		relid = get_relname_relid(STATE_TABLE, schema);
		if (get_relname_relid(DEFAULT_STORE, schema) == store)
		{
			state->expires = true;
			state->retention = IDEM_DEFAULT_RETENTION;
		}
	}
	if (!OidIsValid(relid))
		return;

	rel = table_open(relid, AccessShareLock);
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	scan = systable_beginscan(rel, InvalidOid, false, snapshot, 0, NULL);
	while (!found && HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		TupleDesc	desc = RelationGetDescr(rel);
		Datum		value;
		bool		isnull;

		if (!is_row_of(tuple, desc, store, origin))
			continue;
		found = true;

		value = heap_getattr(tuple, STATE_RETENTION, desc, &isnull);
		state->expires = !isnull && DatumGetInt64(value) > 0;
		state->retention = state->expires ? DatumGetInt64(value) : 0;
		value = heap_getattr(tuple, STATE_CURRENT, desc, &isnull);
		if (!isnull && DatumGetInt16(value) > 0)
			state->current = DatumGetInt16(value);
		value = heap_getattr(tuple, STATE_WATERMARK, desc, &isnull);
		if (!isnull)
			state->watermark = DatumGetTimestampTz(value);
	}
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	table_close(rel, AccessShareLock);
	pfree(origin);
}

/*
 * Set the retention of a store, in seconds, as the owner of the bookkeeping:
 * the caller of idem_create_store() owns the store, not this table.
 *
 * Announced by an invalidation of the store, as every change of its row is.
 */
void
idem_state_set_retention(Oid store, int64 retention)
{
	Oid			schema = idem_extension_schema();
	Oid			relid = get_relname_relid(STATE_TABLE, schema);
	Relation	rel = table_open(relid, RowExclusiveLock);
	char	   *table = quote_qualified_identifier(get_namespace_name(schema),
												   STATE_TABLE);
	Oid			types[5] = {OIDOID, NAMEOID, NAMEOID, TEXTOID, INT8OID};
	Datum		values[5];
	Oid			save_userid;
	int			save_sec_context;

	values[0] = ObjectIdGetDatum(store);
	values[1] = DirectFunctionCall1(namein,
									CStringGetDatum(get_namespace_name(get_rel_namespace(store))));
	values[2] = DirectFunctionCall1(namein,
									CStringGetDatum(get_rel_name(store)));
	values[3] = CStringGetTextDatum(this_origin());
	values[4] = Int64GetDatum(retention);

	GetUserIdAndSecContext(&save_userid, &save_sec_context);
	SetUserIdAndSecContext(rel->rd_rel->relowner,
						   save_sec_context | SECURITY_LOCAL_USERID_CHANGE);
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	if (SPI_execute_with_args(psprintf("UPDATE %s SET retention = $5, store = $1,"
									   " schema_name = $2, store_name = $3, origin = $4"
									   " WHERE CASE WHEN origin OPERATOR(pg_catalog.=) $4"
									   " THEN store OPERATOR(pg_catalog.=) $1"
									   " ELSE schema_name OPERATOR(pg_catalog.=) $2"
									   " AND store_name OPERATOR(pg_catalog.=) $3 END",
									   table),
							  5, types, values, NULL, false, 0) != SPI_OK_UPDATE)
		elog(ERROR, "could not update %s", table);
	if (SPI_processed == 0 &&
		SPI_execute_with_args(psprintf("INSERT INTO %s (store, schema_name, store_name, origin, retention, current)"
									   " VALUES ($1, $2, $3, $4, $5, 0)", table),
							  5, types, values, NULL, false, 0) != SPI_OK_INSERT)
		elog(ERROR, "could not insert into %s", table);
	SPI_finish();
	SetUserIdAndSecContext(save_userid, save_sec_context);

	CacheInvalidateRelcacheByRelid(store);
	table_close(rel, NoLock);
}

/*
 * idem_generation(store regclass) returns smallint
 *
 * The generation that a plain INSERT lands in: the default of the column
 * "generation" of every store.
 */
Datum
idem_generation(PG_FUNCTION_ARGS)
{
	Oid			store = PG_GETARG_OID(0);
	IdemStoreState state;

	idem_state_read(store, &state);
	/* as for claims: bookkeeping that names no partition counts for nothing */
	if (state.current > 0)
	{
		Relation	rel = table_open(store, AccessShareLock);

		if (rel->rd_rel->relkind != RELKIND_PARTITIONED_TABLE ||
			state.current >= RelationGetPartitionDesc(rel, true)->nparts)
			state.current = 0;
		table_close(rel, AccessShareLock);
	}
	PG_RETURN_INT16(state.current);
}
