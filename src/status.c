/*-------------------------------------------------------------------------
 *
 * status.c
 *	  What the views idem_stores and idem_uncertain show.
 *
 * These functions answer for any table: a store that is broken must still be
 * listed.  They write nothing and work on a standby.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/resowner.h"
#include "utils/rls.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "arguments.h"
#include "bookkeeping.h"
#include "compat.h"
#include "store.h"
#include "worker.h"

PG_FUNCTION_INFO_V1(idem_store_status);
PG_FUNCTION_INFO_V1(idem_generation_sealed_at);
PG_FUNCTION_INFO_V1(idem_oldest_record);
PG_FUNCTION_INFO_V1(idem_worker_status);
PG_FUNCTION_INFO_V1(idem_uncertain_records);

static void
set_timestamp(TimestampTz value, Datum *values, bool *nulls, int i)
{
	values[i] = TimestampTzGetDatum(value);
	nulls[i] = value == DT_NOBEGIN;
}

/*
 * idem_store_status(store regclass) returns (retention interval,
 *		current smallint, filling_since, last_step_at, watermark timestamptz,
 *		generations_expired bigint, trouble text)
 */
Datum
idem_store_status(PG_FUNCTION_ARGS)
{
	IdemStoreState state;
	TupleDesc	desc;
	Datum		values[7];
	bool		nulls[7] = {false};

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	idem_check_fits(desc->natts == lengthof(values));
	idem_state_read(PG_GETARG_OID(0), &state);

	nulls[0] = !state.expires;
	if (state.expires)
	{
		Interval   *retention = palloc0(sizeof(Interval));

		retention->day = state.retention / SECS_PER_DAY;
		retention->time = state.retention % SECS_PER_DAY * USECS_PER_SEC;
		values[0] = IntervalPGetDatum(retention);
	}
	values[1] = Int16GetDatum(state.current);
	set_timestamp(state.filling_since, values, nulls, 2);
	set_timestamp(state.last_step_at, values, nulls, 3);
	set_timestamp(state.watermark, values, nulls, 4);
	values[5] = Int64GetDatum(state.emptied);
	nulls[6] = state.trouble == NULL;
	if (state.trouble != NULL)
		values[6] = CStringGetTextDatum(state.trouble);
	return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values,
											 nulls));
}

/*
 * idem_generation_sealed_at(store regclass, generation int,
 *		partition regclass) returns timestamptz: NULL unless there is a valid
 *		note of the sealing
 */
Datum
idem_generation_sealed_at(PG_FUNCTION_ARGS)
{
	Oid			relid = PG_GETARG_OID(2);
	IdemSeal	seal;
	Relation	rel;
	bool		valid;

	idem_state_read_seal(PG_GETARG_OID(0), PG_GETARG_INT32(1), &seal);
	if (!seal.known || !ConditionalLockRelationOid(relid, AccessShareLock))
		PG_RETURN_NULL();
	rel = RelationIdGetRelation(relid);
	valid = RelationIsValid(rel) && rel->rd_rel->relfilenode == seal.relfile;
	if (RelationIsValid(rel))
		RelationClose(rel);
	UnlockRelationOid(relid, AccessShareLock);
	if (!valid)
		PG_RETURN_NULL();
	PG_RETURN_TIMESTAMPTZ(seal.sealed_at);
}

/*
 * idem_oldest_record(partition regclass) returns timestamptz
 *
 * When the first record of a partition was completed: about the oldest, since
 * records are only ever added.  NULL if there is none, the caller may not
 * know, or the partition is locked.
 */
Datum
idem_oldest_record(PG_FUNCTION_ARGS)
{
	Oid			relid = PG_GETARG_OID(0);
	AttrNumber	column = get_attnum(relid, "completed_at");
	Relation	rel;
	SysScanDesc scan;
	HeapTuple	tuple;
	Datum		result = (Datum) 0;
	bool		isnull = true;

	if (column == InvalidAttrNumber ||
		get_rel_relkind(relid) != RELKIND_RELATION ||
		get_atttype(relid, column) != TIMESTAMPTZOID ||
		(pg_class_aclcheck(relid, GetUserId(), ACL_SELECT) != ACLCHECK_OK &&
		 !has_privs_of_role(GetUserId(), ROLE_PG_READ_ALL_STATS)) ||
		!ConditionalLockRelationOid(relid, AccessShareLock))
		PG_RETURN_NULL();

	rel = table_open(relid, NoLock);
	scan = systable_beginscan(rel, InvalidOid, false, GetActiveSnapshot(), 0,
							  NULL);
	while (isnull && HeapTupleIsValid(tuple = systable_getnext(scan)))
		result = heap_getattr(tuple, column, RelationGetDescr(rel), &isnull);
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	if (isnull)
		PG_RETURN_NULL();
	PG_RETURN_DATUM(result);
}

/*
 * idem_worker_status() returns text
 */
Datum
idem_worker_status(PG_FUNCTION_ARGS)
{
	const char *status;

	if (!idem_is_preloaded())
		status = "none: idem is not in shared_preload_libraries";
	else if (RecoveryInProgress())
		status = "none: the server is a standby";
	else if (!idem_worker_enabled)
		status = "none: idem.worker is off";
	else if (!idem_launcher_running())
		status = "none: the launcher is not running";
	else
		status = "running";
	PG_RETURN_TEXT_P(cstring_to_text(status));
}

/*
 * All tables that look like stores, also those that nobody expires.
 */
static List *
all_stores(void)
{
	MemoryContext context = CurrentMemoryContext;
	List	   *stores = NIL;

	if (SPI_execute("SELECT con.conrelid FROM pg_catalog.pg_constraint con,"
					" pg_catalog.pg_class c"
					" WHERE con.conname OPERATOR(pg_catalog.=) 'idem_check'"
					" AND c.oid OPERATOR(pg_catalog.=) con.conrelid"
					" AND c.relkind OPERATOR(pg_catalog.=) 'p'"
					" AND c.relpersistence OPERATOR(pg_catalog.=) 'p'", true,
					0) != SPI_OK_SELECT)
		elog(ERROR, "could not list the stores");
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		MemoryContext spi_context = MemoryContextSwitchTo(context);
		bool		isnull;
		Datum		relid = SPI_getbinval(SPI_tuptable->vals[i],
										  SPI_tuptable->tupdesc, 1, &isnull);

		stores = lappend_oid(stores, DatumGetObjectId(relid));
		MemoryContextSwitchTo(spi_context);
	}
	return stores;
}

/*
 * Is "relid" a store whose records the caller may see, by privileges on it or
 * as a member of pg_read_all_stats?
 */
static bool
may_see(Oid relid)
{
	bool		is_missing = false;
	AttrNumber	column;

	if ((pg_class_aclcheck_ext(relid, GetUserId(), ACL_SELECT,
							   &is_missing) != ACLCHECK_OK ||
		 check_enable_rls(relid, InvalidOid, true) == RLS_ENABLED) &&
		!has_privs_of_role(GetUserId(), ROLE_PG_READ_ALL_STATS))
		return false;
	for (int c = 0; !is_missing && c < IDEM_NCOLUMNS; c++)
	{
		column = get_attnum(relid, idem_column_name(c));
		if (column == InvalidAttrNumber ||
			get_attgenerated(relid, column) != '\0' ||
			get_atttype(relid, column) != idem_column_type(c))
			return false;
	}
	return !is_missing;
}

/*
 * Put the leases of one store that have run out into the tuplestore.
 *
 * Even planning a query can run code of the owner's (constraints, for one),
 * so it is run as the owner, however much the caller may do; and whatever is
 * odd about one store must not keep the others from being shown.
 */
static void
add_uncertain_records(Oid relid, Tuplestorestate *result)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner resource_owner = CurrentResourceOwner;
	Oid			owner = idem_table_owner(relid);
	Oid			save_userid;
	int			save_sec_context;

	if (!OidIsValid(owner))
		return;
	GetUserIdAndSecContext(&save_userid, &save_sec_context);
	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		int			nestlevel = NewGUCNestLevel();

		(void) set_config_option("lock_timeout", "100ms", PGC_USERSET,
								 PGC_S_SESSION, GUC_ACTION_SAVE, true, 0,
								 false);
		SetUserIdAndSecContext(owner, save_sec_context |
							   SECURITY_RESTRICTED_OPERATION);
		if (SPI_connect() != SPI_OK_CONNECT)
			elog(ERROR, "SPI_connect failed");
		if (SPI_execute(psprintf("SELECT %u::pg_catalog.oid::pg_catalog.regclass, key, token,"
								 " attempts, claimed_by, lease_until, checkpoint"
								 " FROM %s WHERE status OPERATOR(pg_catalog.=) 'leased'"
								 " AND (lease_until IS NULL OR"
								 " lease_until OPERATOR(pg_catalog.<=) pg_catalog.clock_timestamp())",
								 relid, idem_store_name(relid)), true,
						0) != SPI_OK_SELECT)
			elog(ERROR, "could not read store %s", idem_store_name(relid));
		for (uint64 i = 0; i < SPI_processed; i++)
			tuplestore_puttuple(result, SPI_tuptable->vals[i]);
		SPI_finish();
		AtEOXact_GUC(false, nestlevel);
		SetUserIdAndSecContext(save_userid, save_sec_context);
		ReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = resource_owner;
	}
	PG_CATCH();
	{
		ErrorData  *edata;

		MemoryContextSwitchTo(context);
		edata = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = resource_owner;
		if (edata->sqlerrcode == ERRCODE_QUERY_CANCELED)
			ReThrowError(edata);
		ereport(WARNING,
				(errcode(edata->sqlerrcode),
				 errmsg("store %s could not be read: %s",
						idem_store_name(relid), edata->message)));
		FreeErrorData(edata);
	}
	PG_END_TRY();
}

/*
 * idem_uncertain_records() returns setof (store regclass, key text,
 *		token bigint, attempts int, claimed_by text, lease_until timestamptz,
 *		checkpoint jsonb): leases that have run out, in all stores of which
 *		the caller may see the records
 */
Datum
idem_uncertain_records(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	ListCell   *lc;

	idem_begin_rows(fcinfo, 7);
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	foreach(lc, all_stores())
	{
		if (may_see(lfirst_oid(lc)))
			add_uncertain_records(lfirst_oid(lc), rsinfo->setResult);
	}
	SPI_finish();
	return (Datum) 0;
}
