/*-------------------------------------------------------------------------
 *
 * create.c
 *	  Create stores, and set their retention.
 *
 * A store is made by plain DDL with the caller's rights, so it belongs to
 * the caller.  It depends on the extension only through the column default
 * and the CHECK constraint: DROP EXTENSION refuses while stores exist, and
 * with CASCADE takes those two away but never a store or a column.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "commands/defrem.h"
#include "commands/extension.h"
#include "executor/spi.h"
#include "fmgr.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "partitioning/partdesc.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/timestamp.h"
#include "utils/varlena.h"

#include "arguments.h"
#include "bookkeeping.h"
#include "claim.h"
#include "compat.h"
#include "store.h"
#include "worker.h"

PG_FUNCTION_INFO_V1(idem_create_store);
PG_FUNCTION_INFO_V1(idem_set_retention);
PG_FUNCTION_INFO_V1(idem_generation);
PG_FUNCTION_INFO_V1(idem_revoke_default_privileges);

/*
 * A retention in seconds: positive, and not in months, which have no fixed
 * length.  Fractions of a second are rounded up.
 */
static int64
retention_from_interval(FunctionCallInfo fcinfo, int n)
{
	Interval   *interval;
	int64		seconds;

	if (PG_ARGISNULL(n))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("retention must not be null"),
				 errhint("Pass an interval such as '30 days'.")));
	interval = PG_GETARG_INTERVAL_P(n);
	if (interval->month != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("retention must not contain months or years"),
				 errhint("State it in days, which count as 24 hours each.")));
	seconds = (int64) interval->day * SECS_PER_DAY +
		interval->time / USECS_PER_SEC;
	if (interval->time % USECS_PER_SEC > 0)
		seconds++;
	if (seconds <= 0 || seconds > IDEM_MAX_RETENTION)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("retention is out of range"),
				 errdetail("It must be more than zero and at most 36525 days."),
				 errhint("Choose it longer than the longest time in which an operation can be retried.")));
	return seconds;
}

/*
 * Note the retention.  Waits for a step of expiry that is under way: once
 * this returns, nothing is emptied by the old retention any more.
 */
static void
set_retention(Oid store, int64 retention)
{
	IdemStateValue values[2] = {
		{"retention", Int64GetDatum(retention), INT8OID, false},
	};
	IdemStoreState state;
	int			n = 1;

	(void) idem_state_lock(store, true);
	/* What other rows know of the past must not go with them */
	idem_state_read(store, &state);
	if (state.watermark != DT_NOBEGIN)
		values[n++] = (IdemStateValue)
		{
			"watermark", TimestampTzGetDatum(state.watermark), TIMESTAMPTZOID,
				false
		};
	idem_state_update(store, values, n);
	idem_state_forget_foreign(store);
}

/*
 * Is this called by the script of CREATE EXTENSION idem?
 */
static bool
creating_idem(void)
{
	return creating_extension &&
		CurrentExtensionObject == get_extension_oid("idem", true);
}

static void
execute(const char *command)
{
	if (SPI_execute(command, false, 0) < 0)
		elog(ERROR, "could not execute: %s", command);
}

/*
 * Take away whatever ALTER DEFAULT PRIVILEGES has granted on a new table.
 */
static void
revoke_from_others(const char *table)
{
	StringInfoData query;

	initStringInfo(&query);
	appendStringInfo(&query,
					 "SELECT DISTINCT CASE WHEN a.grantee OPERATOR(pg_catalog.=) 0::pg_catalog.oid THEN 'PUBLIC'"
					 " ELSE pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(a.grantee)) END"
					 " FROM pg_catalog.pg_class c,"
					 " pg_catalog.aclexplode(c.relacl) a"
					 " WHERE c.oid OPERATOR(pg_catalog.=) %s::pg_catalog.regclass"
					 " AND a.grantee OPERATOR(pg_catalog.<>) c.relowner",
					 quote_literal_cstr(table));
	execute(query.data);
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		SPITupleTable *rows = SPI_tuptable;
		uint64		processed = SPI_processed;

		execute(psprintf("REVOKE ALL ON TABLE %s FROM %s", table,
						 SPI_getvalue(rows->vals[i], rows->tupdesc, 1)));
		SPI_tuptable = rows;
		SPI_processed = processed;
	}
}

/*
 * Make the partition of one generation, with its indexes.
 */
static void
create_partition(const char *store, const char *schema, const char *name,
				 Oid schema_oid, int generation)
{
	char		label[16];
	char	   *relname;
	char	   *partition;
	char	   *index;

	snprintf(label, sizeof(label), "%d", generation);
	/* In the script of the extension, a table in the way is an error */
	relname = creating_idem() ? makeObjectName(name, NULL, label) :
		ChooseRelationName(name, NULL, label, schema_oid, false);
	partition = quote_qualified_identifier(schema, relname);
	execute(psprintf("CREATE TABLE %s PARTITION OF %s FOR VALUES IN (%d) USING heap",
					 partition, store, generation));
	revoke_from_others(partition);

	/*
	 * A default of its own, since the inherited one names the store: a dump
	 * without the store (pg_dump -T) could not be restored.
	 */
	execute(psprintf("ALTER TABLE %s ALTER COLUMN generation SET DEFAULT %d",
					 partition, generation));

	index = ChooseRelationName(relname, "key", "idx", schema_oid, false);
	execute(psprintf("CREATE UNIQUE INDEX %s ON %s (key)",
					 quote_identifier(index), partition));
	execute(psprintf("ALTER TABLE %s REPLICA IDENTITY USING INDEX %s",
					 partition, quote_identifier(index)));
	execute(psprintf("CREATE INDEX ON %s USING brin (completed_at)"
					 " WITH (autosummarize = on)", partition));
	execute(psprintf("CREATE INDEX ON %s (lease_until)"
					 " WHERE status OPERATOR(pg_catalog.=) 'leased'",
					 partition));
}

/*
 * idem_create_store(name text, retention interval, generations int)
 *		returns text
 *
 * Returns the qualified name.  As part of CREATE EXTENSION it makes the
 * default store, whose retention is the default as long as nothing is noted.
 */
Datum
idem_create_store(PG_FUNCTION_ARGS)
{
	int64		retention;
	int			generations;
	List	   *names;
	RangeVar   *rv;
	Oid			schema_oid;
	Oid			functions_schema;
	Oid			relid;
	char	   *schema;
	char	   *store;
	char	   *functions;

	idem_check_nargs(fcinfo, 3);
	retention = retention_from_interval(fcinfo, 1);
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("name of the store must not be null"),
				 errhint("Pass a table name, with its schema or without.")));
	if (PG_ARGISNULL(2) || PG_GETARG_INT32(2) < 2 ||
		PG_GETARG_INT32(2) > IDEM_MAX_GENERATIONS)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("number of generations is out of range"),
				 errdetail("It must be between 2 and %d.",
						   IDEM_MAX_GENERATIONS),
				 errhint("4 suits most: a record then lives at most a third longer than its retention.")));
	generations = PG_GETARG_INT32(2);
	idem_check_may_write("idem_create_store()");

	names = textToQualifiedNameList(PG_GETARG_TEXT_PP(0));
	rv = makeRangeVarFromNameList(names);
	schema_oid = RangeVarGetAndCheckCreationNamespace(rv, NoLock, NULL);
	if (rv->relpersistence != RELPERSISTENCE_PERMANENT ||
		isAnyTempNamespace(schema_oid))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("a store cannot be temporary"),
				 errhint("Name a permanent schema.")));
	schema = get_namespace_name(schema_oid);
	store = quote_qualified_identifier(schema, rv->relname);
	functions_schema = idem_extension_schema();
	if (!OidIsValid(functions_schema))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("extension \"idem\" does not exist in this database"),
				 errhint("Run CREATE EXTENSION idem.")));
	functions = pstrdup(quote_identifier(get_namespace_name(functions_schema)));

	/* Before there is a table of this name again */
	if (!creating_idem())
		idem_state_forget_dropped();

	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	execute(psprintf("CREATE TABLE %s ("
					 "key pg_catalog.text COLLATE pg_catalog.\"C\" NOT NULL,"
					 "status pg_catalog.text NOT NULL DEFAULT 'completed',"
					 "attempts pg_catalog.int4 DEFAULT 1,"
					 "token pg_catalog.int8,"
					 "claimed_at pg_catalog.timestamptz,"
					 "completed_at pg_catalog.timestamptz DEFAULT pg_catalog.clock_timestamp(),"
					 "lease_until pg_catalog.timestamptz,"
					 "claimed_by pg_catalog.text,"
					 "fingerprint pg_catalog.uuid,"
					 "checkpoint pg_catalog.jsonb,"
					 "result pg_catalog.json,"
					 "generation pg_catalog.int2 NOT NULL,"
					 "CONSTRAINT idem_check CHECK (%s.idem_check(key, status, generation, %d))"
					 ") PARTITION BY LIST (generation)",
					 store, functions, generations));
	revoke_from_others(store);
	execute(psprintf("ALTER TABLE %s ALTER COLUMN generation"
					 " SET DEFAULT %s.idem_generation(%s::pg_catalog.regclass)",
					 store, functions, quote_literal_cstr(store)));
	for (int i = 0; i < generations; i++)
		create_partition(store, schema, rv->relname, schema_oid, i);
	SPI_finish();
	if (creating_idem())
		idem_launcher_welcome();

	relid = get_relname_relid(rv->relname, schema_oid);
	if (!creating_idem())
	{
		set_retention(relid, retention);
	}
	PG_RETURN_TEXT_P(cstring_to_text(idem_store_name(relid)));
}

/*
 * idem_revoke_default_privileges() returns integer
 *
 * The last act of the script of CREATE EXTENSION, which drops it again: on
 * none of the relations it has made shall anybody have privileges but the
 * owner, whatever ALTER DEFAULT PRIVILEGES says.  Returns how many there are.
 */
Datum
idem_revoke_default_privileges(PG_FUNCTION_ARGS)
{
	SPITupleTable *rows;
	uint64		processed;

	if (!creating_idem())
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("this function is for CREATE EXTENSION idem only"),
				 errhint("Use REVOKE.")));
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	execute(psprintf("SELECT objid::pg_catalog.regclass FROM pg_catalog.pg_depend"
					 " WHERE classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass"
					 " AND refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass"
					 " AND refobjid OPERATOR(pg_catalog.=) %u::pg_catalog.oid"
					 " AND deptype OPERATOR(pg_catalog.=) 'e'",
					 CurrentExtensionObject));
	rows = SPI_tuptable;
	processed = SPI_processed;
	for (uint64 i = 0; i < processed; i++)
		revoke_from_others(SPI_getvalue(rows->vals[i], rows->tupdesc, 1));
	SPI_finish();
	PG_RETURN_INT32((int32) processed);
}

/*
 * idem_set_retention(retention interval, store regclass) returns text
 */
Datum
idem_set_retention(PG_FUNCTION_ARGS)
{
	Oid			store = idem_arg_store(fcinfo, 1);
	int64		retention = retention_from_interval(fcinfo, 0);

	idem_check_may_write("idem_set_retention()");
	if (!idem_table_ownercheck(store, GetUserId()))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("must be owner of store %s", idem_store_name(store)),
				 errhint("Ask the owner of the table to set its retention.")));
	(void) idem_store_open(store, 0, RowExclusiveLock);
	set_retention(store, retention);
	PG_RETURN_TEXT_P(cstring_to_text(idem_store_name(store)));
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
