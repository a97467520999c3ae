/*-------------------------------------------------------------------------
 *
 * bookkeeping.c
 *	  What idem_store_state says of a store.
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
#include "catalog/namespace.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "executor/spi.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "bookkeeping.h"
#include "idem.h"
#include "store.h"

#define STATE_TABLE		"idem_store_state"
#define DEFAULT_STORE	"idem_completions"

/* A row that was not written about a table of this database: $1 is "origin" */
#define FOREIGN(origin) \
	"(origin OPERATOR(pg_catalog.<>) " origin " OR NOT EXISTS" \
	" (SELECT FROM pg_catalog.pg_class c WHERE c.oid OPERATOR(pg_catalog.=) store))"

/* Columns of idem_store_state that are read here */
enum
{
	STATE_STORE = 1,
	STATE_SCHEMA_NAME,
	STATE_STORE_NAME,
	STATE_ORIGIN,
	STATE_RETENTION,
	STATE_CURRENT,
	STATE_FILLING_SINCE,
	STATE_SEALED_AT,
	STATE_SEALED_XID,
	STATE_SEALED_FILE,
	STATE_WATERMARK,
	STATE_LAST_STEP_AT,
	STATE_EMPTIED,
	STATE_TROUBLE
};

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

/* What identifies this database for good: a clone or a restore differs */
char *
idem_database_origin(void)
{
	return psprintf(UINT64_FORMAT "/%u", GetSystemIdentifier(), MyDatabaseId);
}

/* A row of idem_store_state, as far as it says whose it is */
typedef struct RowIdentity
{
	bool		local;			/* written in this database */
	Oid			store;
	Name		schema_name;
	Name		store_name;
} RowIdentity;

static RowIdentity
identity_of(HeapTuple tuple, TupleDesc desc, const char *origin)
{
	RowIdentity row;
	Datum		value;
	bool		isnull;

	/* all four are NOT NULL */
	value = heap_getattr(tuple, STATE_STORE, desc, &isnull);
	row.store = DatumGetObjectId(value);
	value = heap_getattr(tuple, STATE_SCHEMA_NAME, desc, &isnull);
	row.schema_name = DatumGetName(value);
	value = heap_getattr(tuple, STATE_STORE_NAME, desc, &isnull);
	row.store_name = DatumGetName(value);
	value = heap_getattr(tuple, STATE_ORIGIN, desc, &isnull);
	row.local = strcmp(TextDatumGetCString(value), origin) == 0;
	return row;
}

/*
 * The oid of the table that a row is about now, InvalidOid if there is none.
 */
static Oid
store_of(const RowIdentity *row)
{
	Oid			schema;

	/* The oid, or after a restore, also into the same database, the name */
	if (row->local && get_rel_name(row->store) != NULL)
		return row->store;
	schema = get_namespace_oid(NameStr(*row->schema_name), true);
	return OidIsValid(schema) ?
		get_relname_relid(NameStr(*row->store_name), schema) : InvalidOid;
}

/*
 * Open the bookkeeping table; NULL if there is none.
 */
static Relation
open_state_table(LOCKMODE lockmode)
{
	Oid			schema = idem_extension_schema();
	Oid			relid = OidIsValid(schema) ?
		get_relname_relid(STATE_TABLE, schema) : InvalidOid;

	Relation	rel;

	if (!OidIsValid(relid))
		return NULL;
	rel = table_open(relid, lockmode);
	if (RelationGetNumberOfAttributes(rel) < STATE_TROUBLE)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("SQL objects of extension \"idem\" are older than its library"),
				 errhint("Run ALTER EXTENSION idem UPDATE.")));
	return rel;
}

/* A scan of idem_store_state with a snapshot of its own */
typedef struct StateScan
{
	Relation	rel;
	Snapshot	snapshot;
	SysScanDesc scan;
	char	   *origin;
} StateScan;

/*
 * Begin a scan; false if there is no such table.
 */
static bool
begin_state_scan(StateScan *ss)
{
	ss->rel = open_state_table(AccessShareLock);
	if (ss->rel == NULL)
		return false;
	ss->snapshot = RegisterSnapshot(GetLatestSnapshot());
	ss->scan = systable_beginscan(ss->rel, InvalidOid, false, ss->snapshot, 0,
								  NULL);
	ss->origin = idem_database_origin();
	return true;
}

static void
end_state_scan(StateScan *ss)
{
	systable_endscan(ss->scan);
	UnregisterSnapshot(ss->snapshot);
	table_close(ss->rel, AccessShareLock);
}

static Oid
default_store(void)
{
	Oid			schema = idem_extension_schema();

	return OidIsValid(schema) ?
		get_relname_relid(DEFAULT_STORE, schema) : InvalidOid;
}

static Datum
get_column(HeapTuple tuple, int column, TupleDesc desc, Datum if_null)
{
	bool		isnull;
	Datum		value = heap_getattr(tuple, column, desc, &isnull);

	return isnull ? if_null : value;
}

/*
 * Take over what a row says.  Where more than one is about the store (one
 * made here, and one that came with a restore or by replication), the
 * retention is the longest and the watermark the latest of them, and all
 * else comes from the row made here.
 */
static void
merge_row(HeapTuple tuple, TupleDesc desc, bool local, IdemStoreState *state)
{
	Datum		never = TimestampTzGetDatum(DT_NOBEGIN);
	int64		retention;
	TimestampTz watermark;
	Datum		trouble;

	retention = DatumGetInt64(get_column(tuple, STATE_RETENTION, desc,
										 Int64GetDatum(0)));
	state->retention = Max(state->retention,
						   Min(retention, IDEM_MAX_RETENTION));
	watermark = DatumGetTimestampTz(get_column(tuple, STATE_WATERMARK, desc,
											   never));
	state->watermark = Max(state->watermark, watermark);
	if (state->has_local_row && !local)
		return;
	state->has_local_row |= local;
	state->current = DatumGetInt16(get_column(tuple, STATE_CURRENT, desc, 0));
	state->current = Max(state->current, 0);
	state->filling_since =
		DatumGetTimestampTz(get_column(tuple, STATE_FILLING_SINCE, desc,
									   never));
	state->last_step_at =
		DatumGetTimestampTz(get_column(tuple, STATE_LAST_STEP_AT, desc,
									   never));
	state->emptied = DatumGetInt64(get_column(tuple, STATE_EMPTIED, desc,
											  Int64GetDatum(0)));
	trouble = get_column(tuple, STATE_TROUBLE, desc, (Datum) 0);
	state->trouble = DatumGetPointer(trouble) == NULL ? NULL :
		TextDatumGetCString(trouble);
}

/*
 * Read what is known of "store".  Takes AccessShareLock on the bookkeeping
 * table and releases it; privileges are not asked for, since every claimer
 * needs this.
 */
void
idem_state_read(Oid store, IdemStoreState *state)
{
	StateScan	ss;
	HeapTuple	tuple;

	memset(state, 0, sizeof(IdemStoreState));
	state->watermark = state->filling_since = state->last_step_at = DT_NOBEGIN;
	if (begin_state_scan(&ss))
	{
		TupleDesc	desc = RelationGetDescr(ss.rel);

		while (HeapTupleIsValid(tuple = systable_getnext(ss.scan)))
		{
			RowIdentity row = identity_of(tuple, desc, ss.origin);

			if (store_of(&row) == store)
				merge_row(tuple, desc, row.local && row.store == store, state);
		}
		end_state_scan(&ss);
	}
	if (state->retention <= 0 && store == default_store())
		state->retention = IDEM_DEFAULT_RETENTION;
	state->expires = state->retention > 0;
}

/*
 * Element "generation" (from 0) of an array column with subscripts from 1.
 */
static bool
get_element(HeapTuple tuple, int column, TupleDesc desc, Oid type,
			int generation, Datum *value)
{
	Datum		array = get_column(tuple, column, desc, (Datum) 0);
	int			subscript = generation + 1;
	int16		typlen;
	bool		typbyval;
	char		typalign;
	bool		isnull;

	if (DatumGetPointer(array) == NULL)
		return false;
	get_typlenbyvalalign(type, &typlen, &typbyval, &typalign);
	*value = array_get_element(array, 1, &subscript, -1, typlen, typbyval,
							   typalign, &isnull);
	return !isnull;
}

/*
 * Read what was noted when a generation was sealed.  A note that came from
 * another database means nothing here.
 */
void
idem_state_read_seal(Oid store, int generation, IdemSeal *seal)
{
	StateScan	ss;
	HeapTuple	tuple;

	memset(seal, 0, sizeof(IdemSeal));
	if (!begin_state_scan(&ss))
		return;
	while (HeapTupleIsValid(tuple = systable_getnext(ss.scan)))
	{
		TupleDesc	desc = RelationGetDescr(ss.rel);
		RowIdentity row = identity_of(tuple, desc, ss.origin);
		Datum		sealed_at;
		Datum		next_xid;
		Datum		relfile;

		if (!row.local || row.store != store ||
			!get_element(tuple, STATE_SEALED_AT, desc, TIMESTAMPTZOID,
						 generation, &sealed_at) ||
			!get_element(tuple, STATE_SEALED_XID, desc, XID8OID, generation,
						 &next_xid) ||
			!get_element(tuple, STATE_SEALED_FILE, desc, OIDOID, generation,
						 &relfile))
			continue;
		seal->known = true;
		seal->sealed_at = DatumGetTimestampTz(sealed_at);
		seal->next_xid = DatumGetUInt64(next_xid);
		seal->relfile = DatumGetObjectId(relfile);
	}
	end_state_scan(&ss);
}

/*
 * Take the lock under which everything about a store is decided, to the end
 * of the transaction.  The invalidation that a holder has queued is sent
 * before its locks are released, so whoever has the lock knows that everybody
 * who accepts invalidations from now on sees what earlier holders did.
 */
bool
idem_state_lock(Oid store, bool wait)
{
	ResourceOwner oldowner = CurrentResourceOwner;
	LOCKTAG		tag;
	LockAcquireResult result = LOCKACQUIRE_NOT_AVAIL;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, 0, store, IDEM_STORE_LOCK_CLASS);
	CurrentResourceOwner = CurTransactionResourceOwner;
	PG_TRY();
	{
		result = LockAcquire(&tag, ExclusiveLock, false, !wait);
	}
	PG_FINALLY();
	{
		CurrentResourceOwner = oldowner;
	}
	PG_END_TRY();
	return result != LOCKACQUIRE_NOT_AVAIL;
}

/*
 * Run a command on the bookkeeping with a snapshot taken now: a row that was
 * made since the transaction's must not be made a second time.
 */
static void
execute(const char *command, int nargs, Oid *types, Datum *values,
		const char *nulls)
{
	SPIPlanPtr	plan = SPI_prepare(command, nargs, types);
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());

	if (plan == NULL ||
		SPI_execute_snapshot(plan, values, nulls, snapshot, InvalidSnapshot,
							 false, true, 0) < 0)
		elog(ERROR, "could not execute: %s", command);
	UnregisterSnapshot(snapshot);
}

/*
 * Act as the owner of the bookkeeping.  Restricted, so that a deferred
 * trigger on it is an error: at commit it would run as somebody else.
 */
static void
become_owner(Relation rel, Oid *save_userid, int *save_sec_context)
{
	GetUserIdAndSecContext(save_userid, save_sec_context);
	SetUserIdAndSecContext(rel->rd_rel->relowner,
						   *save_sec_context | SECURITY_RESTRICTED_OPERATION);
}

/*
 * Delete rows of the bookkeeping, as its owner.
 */
static void
delete_rows(const char *condition, int nargs, Oid *types, Datum *args)
{
	Relation	rel = open_state_table(RowExclusiveLock);
	Oid			save_userid;
	int			save_sec_context;

	if (rel == NULL)
		return;
	become_owner(rel, &save_userid, &save_sec_context);
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	execute(psprintf("DELETE FROM %1$s WHERE ctid OPERATOR(pg_catalog.=) ANY (ARRAY("
					 "SELECT ctid FROM %1$s WHERE %2$s FOR UPDATE SKIP LOCKED))",
					 idem_store_name(RelationGetRelid(rel)), condition),
			nargs, types, args, NULL);
	SPI_finish();
	SetUserIdAndSecContext(save_userid, save_sec_context);
	table_close(rel, NoLock);
}

/*
 * Delete what came from another database about a store of this name: it has
 * been decided upon here.
 */
void
idem_state_forget_foreign(Oid store)
{
	Oid			types[3] = {NAMEOID, NAMEOID, TEXTOID};
	Datum		args[3];
	char	   *schema = get_namespace_name(get_rel_namespace(store));

	args[0] = DirectFunctionCall1(namein, CStringGetDatum(schema));
	args[1] = DirectFunctionCall1(namein,
								  CStringGetDatum(get_rel_name(store)));
	args[2] = CStringGetTextDatum(idem_database_origin());
	delete_rows("schema_name OPERATOR(pg_catalog.=) $1"
				" AND store_name OPERATOR(pg_catalog.=) $2"
				" AND " FOREIGN("$3"), 3, types, args);
}

/*
 * Change the row of a store, which is made if there is none, as the owner of
 * the bookkeeping: who owns a store need not own this table.  The caller
 * holds the store's lock.
 *
 * A row that came from another database becomes this one's: its names have
 * led here, but its notes about sealing mean nothing.  Announced by an
 * invalidation of the store, to be sent when the transaction commits.
 */
void
idem_state_update(Oid store, const IdemStateValue *values, int nvalues)
{
	char	   *name = get_rel_name(store);
	char	   *schema = get_namespace_name(get_rel_namespace(store));
	Relation	rel = open_state_table(RowExclusiveLock);
	char	   *table;
	Oid			types[16] = {OIDOID, NAMEOID, NAMEOID, TEXTOID};
	Datum		args[16];
	char		nulls[16] = "    ";
	StringInfoData command;
	Oid			save_userid;
	int			save_sec_context;

	Assert(nvalues <= 12);
	if (name == NULL || schema == NULL || rel == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("store with OID %u or the bookkeeping of idem does not exist any more",
						store),
				 errhint("Something else has dropped it in the meantime.")));
	table = idem_store_name(RelationGetRelid(rel));
	args[0] = ObjectIdGetDatum(store);
	args[1] = DirectFunctionCall1(namein, CStringGetDatum(schema));
	args[2] = DirectFunctionCall1(namein, CStringGetDatum(name));
	args[3] = CStringGetTextDatum(idem_database_origin());

	become_owner(rel, &save_userid, &save_sec_context);
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");

	/* Its own row, else one that came from elsewhere, else a new one */
	execute(psprintf("UPDATE %s SET schema_name = $2, store_name = $3"
					 " WHERE store OPERATOR(pg_catalog.=) $1"
					 " AND origin OPERATOR(pg_catalog.=) $4", table),
			4, types, args, nulls);
	if (SPI_processed == 0)
		execute(psprintf("UPDATE %s SET store = $1, origin = $4, sealed_at = '{}',"
						 " sealed_xid = '{}', sealed_file = '{}'"
						 " WHERE schema_name OPERATOR(pg_catalog.=) $2"
						 " AND store_name OPERATOR(pg_catalog.=) $3"
						 " AND " FOREIGN("$4"), table),
				4, types, args, nulls);
	if (SPI_processed == 0)
		execute(psprintf("INSERT INTO %s (store, schema_name, store_name, origin, retention)"
						 " VALUES ($1, $2, $3, $4, %s)", table,
						 store == default_store() ?
						 CppAsString2(2592000) : "NULL"),
				4, types, args, nulls);

	initStringInfo(&command);
	appendStringInfo(&command, "UPDATE %s SET ", table);
	for (int i = 0; i < nvalues; i++)
	{
		types[4 + i] = values[i].type;
		args[4 + i] = values[i].value;
		nulls[4 + i] = values[i].isnull ? 'n' : ' ';
		appendStringInfo(&command, "%s%s = $%d", i > 0 ? ", " : "",
						 values[i].column, 5 + i);
	}
	appendStringInfoString(&command,
						   " WHERE store OPERATOR(pg_catalog.=) $1"
						   " AND origin OPERATOR(pg_catalog.=) $4");
	execute(command.data, 4 + nvalues, types, args, nulls);

	SPI_finish();
	SetUserIdAndSecContext(save_userid, save_sec_context);
	CacheInvalidateRelcacheByRelid(store);
	table_close(rel, NoLock);
}

/*
 * All tables that the bookkeeping says are stores that expire.
 */
List *
idem_state_stores(void)
{
	StateScan	ss;
	HeapTuple	tuple;
	List	   *stores = NIL;

	if (OidIsValid(default_store()))
		stores = lappend_oid(stores, default_store());
	if (!begin_state_scan(&ss))
		return stores;
	while (HeapTupleIsValid(tuple = systable_getnext(ss.scan)))
	{
		RowIdentity row = identity_of(tuple, RelationGetDescr(ss.rel),
									  ss.origin);
		Oid			store = store_of(&row);

		if (OidIsValid(store))
			stores = list_append_unique_oid(stores, store);
	}
	end_state_scan(&ss);
	return stores;
}

/*
 * Delete the rows of stores that were dropped here, as the table's owner.
 * Rows from elsewhere stay: their store may still be restored.
 */
void
idem_state_forget_dropped(void)
{
	StateScan	ss;
	HeapTuple	tuple;
	List	   *dropped = NIL;
	ListCell   *lc;

	if (!begin_state_scan(&ss))
		return;
	while (HeapTupleIsValid(tuple = systable_getnext(ss.scan)))
	{
		RowIdentity row = identity_of(tuple, RelationGetDescr(ss.rel),
									  ss.origin);

		if (row.local && !OidIsValid(store_of(&row)))
			dropped = lappend_oid(dropped, row.store);
	}
	end_state_scan(&ss);

	foreach(lc, dropped)
	{
		Oid			types[2] = {OIDOID, TEXTOID};
		Datum		args[2];

		args[0] = ObjectIdGetDatum(lfirst_oid(lc));
		args[1] = CStringGetTextDatum(idem_database_origin());
		delete_rows("store OPERATOR(pg_catalog.=) $1"
					" AND origin OPERATOR(pg_catalog.=) $2", 2, types, args);
	}
}
