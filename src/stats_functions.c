/*-------------------------------------------------------------------------
 *
 * stats_functions.c
 *	  What the views of statistics read, and idem_stat_reset().
 *
 * All of it is shared memory of this server: it works on a standby, and is
 * about the current database only.  Without preload there is none; the
 * functions then raise an error unless they are told not to.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_authid.h"
#include "common/hashfn.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "activity.h"
#include "arguments.h"
#include "compat.h"
#include "hotkeys.h"
#include "stats.h"
#include "store.h"

PG_FUNCTION_INFO_V1(idem_stat_counters);
PG_FUNCTION_INFO_V1(idem_stat_status);
PG_FUNCTION_INFO_V1(idem_stat_hot_keys);
PG_FUNCTION_INFO_V1(idem_stat_activity);
PG_FUNCTION_INFO_V1(idem_stat_reset);

static void
check_available(void)
{
	if (!idem_stats_available())
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("statistics of idem must be loaded via shared_preload_libraries"),
				 errhint("Add idem to \"shared_preload_libraries\" and restart the server; everything but the statistics and the worker does without.")));
}

/*
 * May the caller see what this role does?
 */
static bool
may_see_role(Oid role)
{
	return has_privs_of_role(GetUserId(), role) ||
		has_privs_of_role(GetUserId(), ROLE_PG_READ_ALL_STATS);
}

static Datum
visible_key(bool visible, const char *key, int len)
{
	return PointerGetDatum(visible ? cstring_to_text_with_len(key, len) :
						   cstring_to_text("<insufficient privilege>"));
}

/*
 * idem_stat_counters(required boolean) returns setof (store oid, a bigint for
 *		each counter, wait_usecs_max bigint, stats_reset timestamptz)
 */
Datum
idem_stat_counters(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	IdemStatsRow *rows;
	int			nrows;

	if (PG_ARGISNULL(0) || PG_GETARG_BOOL(0))
		check_available();
	idem_begin_rows(fcinfo, COUNT_N + 3);
	nrows = idem_stats_rows(MyDatabaseId, &rows);
	for (int i = 0; i < nrows; i++)
	{
		Datum		values[COUNT_N + 3];
		bool		nulls[COUNT_N + 3] = {false};

		values[0] = ObjectIdGetDatum(rows[i].store);
		for (int c = 0; c < COUNT_N; c++)
			values[1 + c] = Int64GetDatum((int64) (rows[i].counters[c] -
												   rows[i].base[c]));
		values[COUNT_N + 1] = Int64GetDatum((int64) rows[i].wait_usecs_max);
		values[COUNT_N + 2] = TimestampTzGetDatum(rows[i].reset_at);
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values,
							 nulls);
	}
	return (Datum) 0;
}

/*
 * idem_stat_status() returns (preloaded, tracking boolean, capacity,
 *		used integer, overflowed bigint, started_from text)
 */
Datum
idem_stat_status(PG_FUNCTION_ARGS)
{
	TupleDesc	desc;
	Datum		values[6];
	bool		nulls[6] = {false};

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	idem_check_fits(desc->natts == lengthof(values));
	values[0] = BoolGetDatum(idem_stats_available());
	values[1] = BoolGetDatum(idem_stats_available() && idem_track);
	values[2] = Int32GetDatum(idem_stats_available() ? IDEM_STATS_CAPACITY : 0);
	values[3] = Int32GetDatum(idem_stats_used());
	values[4] = Int64GetDatum((int64) idem_stats_overflowed());
	values[5] = CStringGetTextDatum(idem_stats_origin());
	return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc), values,
											 nulls));
}

/*
 * idem_stat_hot_keys(required boolean) returns setof (store, role oid,
 *		key text, replays, error bigint, first_replay, last_replay timestamptz)
 */
Datum
idem_stat_hot_keys(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	IdemHotKey *keys;
	int			nkeys;

	if (PG_ARGISNULL(0) || PG_GETARG_BOOL(0))
		check_available();
	idem_begin_rows(fcinfo, 7);
	nkeys = idem_hotkeys_read(MyDatabaseId, &keys);
	for (int i = 0; i < nkeys; i++)
	{
		IdemHotKey *k = &keys[i];
		bool		visible = may_see_role(k->role);
		Datum		values[7];
		bool		nulls[7] = {false};

		values[0] = ObjectIdGetDatum(k->store);
		values[1] = ObjectIdGetDatum(k->role);
		nulls[1] = !visible;
		values[2] = visible_key(visible, k->key, k->len);
		values[3] = Int64GetDatum((int64) k->count);
		values[4] = Int64GetDatum((int64) k->error);
		values[5] = TimestampTzGetDatum(k->first_at);
		values[6] = TimestampTzGetDatum(k->last_at);
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values,
							 nulls);
	}
	return (Datum) 0;
}

/*
 * One row of idem_stat_activity(); "hash" tells keys apart that are not shown.
 */
static void
put_activity(ReturnSetInfo *rsinfo, const IdemActivity *a,
			 const IdemActivityKey *k, bool waiting)
{
	bool		visible = may_see_role(a->role);
	Datum		values[8];
	bool		nulls[8] = {false};

	values[0] = Int32GetDatum(a->pid);
	values[1] = ObjectIdGetDatum(a->role);
	nulls[1] = !visible;
	values[2] = ObjectIdGetDatum(k->store);
	values[3] = visible_key(visible, k->key, k->len);
	values[4] = Int32GetDatum((int32) hash_bytes((const unsigned char *) k->key,
												 k->len));
	values[5] = BoolGetDatum(waiting);
	values[6] = TimestampTzGetDatum(k->since);
	values[7] = Int32GetDatum(a->more);
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

/*
 * idem_stat_activity(required boolean) returns setof (pid integer, role,
 *		store oid, key text, hash integer, waiting boolean, since timestamptz,
 *		others integer)
 */
Datum
idem_stat_activity(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	IdemActivity *a = palloc(sizeof(IdemActivity));

	if (PG_ARGISNULL(0) || PG_GETARG_BOOL(0))
		check_available();
	idem_begin_rows(fcinfo, 8);
	for (int i = 0; i < idem_activity_slots(); i++)
	{
		if (!idem_activity_read(i, a) || a->database != MyDatabaseId)
			continue;
		for (int k = 0; k < IDEM_ACTIVITY_KEYS; k++)
			if (OidIsValid(a->held[k].store))
				put_activity(rsinfo, a, &a->held[k], false);
		if (OidIsValid(a->waiting.store))
			put_activity(rsinfo, a, &a->waiting, true);
	}
	return (Datum) 0;
}

/*
 * idem_stat_reset(store regclass) returns timestamptz
 */
Datum
idem_stat_reset(PG_FUNCTION_ARGS)
{
	Oid			store = idem_arg_store(fcinfo, 0);

	check_available();
	if (!idem_table_ownercheck(store, GetUserId()))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("must be owner of store %s", idem_store_name(store)),
				 errhint("Ask the owner of the table, or a superuser.")));
	idem_stats_reset(store);
	PG_RETURN_TIMESTAMPTZ(GetCurrentTimestamp());
}
