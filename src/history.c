/*-------------------------------------------------------------------------
 *
 * history.c
 *	  Counters folded into the table idem_history, minute by minute.
 *
 * Only the worker comes here.  A minute that is over becomes a row for every
 * store that has counted anything in it, named by the minute in which it
 * began; "seconds" says how long it really was.  The counters in shared
 * memory are told after the commit that this much has been folded, so an
 * error leaves it all to the next round.
 *
 * The table belongs to whoever owns the extension, and it is written with
 * that role's rights, restricted, as the bookkeeping of expiry is.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

#include "bookkeeping.h"
#include "history.h"
#include "stats.h"
#include "store.h"

#define HISTORY_TABLE	"idem_history"
#define SPIKES_VIEW		"idem_spikes"
#define KEEP			"30 days"

/* An episode is over after so long without a spike */
#define EPISODE_GAP		"10 minutes"

/* Columns of the table, for the counters in their order */
static const char *const columns[] = {
	"claims", "executed", "suppressed", "waits", "wait_ms", "in_progress",
	"key_reused", "too_late", "unfinished", "released", "rolled_back",
	"leases", "uncertain", "retried", "skipped", "resolved"
};

StaticAssertDecl(lengthof(columns) == COUNT_KEYS_SAMPLED,
				 "a column for each counter but those about keys");

static TimestampTz
minute_of(TimestampTz t)
{
	return t - t % USECS_PER_MINUTE;
}

static bool
has_counted(const IdemStatsRow *row)
{
	for (int c = 0; c < lengthof(columns); c++)
		if (row->counters[c] != row->folded[c])
			return true;
	return false;
}

/*
 * INSERT INTO table (minute, store, ...) VALUES ($1, ...), adding to a row of
 * the same minute, which there is only where the clock was set back.
 */
static char *
insert_command(const char *table)
{
	StringInfoData buf;

	initStringInfo(&buf);
	appendStringInfo(&buf, "INSERT INTO %s AS h (minute, store, store_name,"
					 " origin, seconds", table);
	for (int c = 0; c < lengthof(columns); c++)
		appendStringInfo(&buf, ", %s", columns[c]);
	appendStringInfoString(&buf, ") VALUES ($1, $2, $3, $4, $5");
	for (int c = 0; c < lengthof(columns); c++)
		appendStringInfo(&buf, ", $%d", 6 + c);
	appendStringInfoString(&buf, ") ON CONFLICT (minute, store, origin)"
						   " DO UPDATE SET seconds = h.seconds"
						   " OPERATOR(pg_catalog.+) excluded.seconds");
	for (int c = 0; c < lengthof(columns); c++)
		appendStringInfo(&buf, ", %s = h.%s OPERATOR(pg_catalog.+) excluded.%s",
						 columns[c], columns[c], columns[c]);
	return buf.data;
}

static void
insert_row(const char *command, const IdemStatsRow *row, TimestampTz now)
{
	Oid			types[5 + lengthof(columns)] = {
		TIMESTAMPTZOID, OIDOID, TEXTOID, TEXTOID, FLOAT8OID
	};
	Datum		args[5 + lengthof(columns)];

	args[0] = TimestampTzGetDatum(minute_of(row->folded_at));
	args[1] = ObjectIdGetDatum(row->store);
	args[2] = CStringGetTextDatum(idem_store_name(row->store));
	args[3] = CStringGetTextDatum(idem_database_origin());
	args[4] = Float8GetDatum((double) (now - row->folded_at) / USECS_PER_SEC);
	for (int c = 0; c < lengthof(columns); c++)
	{
		uint64		n = row->counters[c] - row->folded[c];

		types[5 + c] = c == COUNT_WAIT_USECS ? FLOAT8OID : INT8OID;
		args[5 + c] = c == COUNT_WAIT_USECS ? Float8GetDatum(n / 1000.0) :
			Int64GetDatum((int64) n);
	}
	if (SPI_execute_with_args(command, lengthof(types), types, args, NULL,
							  false, 0) != SPI_OK_INSERT)
		elog(ERROR, "could not execute: %s", command);
}

/*
 * Fold what has been counted up to now, for stores whose last folding was in
 * an earlier minute, and delete what is too old.  *fold, in the current
 * memory context, is for idem_history_folded() after the commit.
 */
void
idem_history_fold(IdemFold *fold)
{
	Oid			schema = idem_extension_schema();
	Oid			relid = OidIsValid(schema) ?
		get_relname_relid(HISTORY_TABLE, schema) : InvalidOid;
	TimestampTz now = GetCurrentTimestamp();
	IdemStatsRow *rows;
	int			nrows;
	char	   *table;
	char	   *command;
	Relation	rel;
	Oid			save_userid;
	int			save_sec_context;

	fold->nrows = 0;
	if (!OidIsValid(relid) || !idem_stats_available())
		return;
	nrows = idem_stats_rows(MyDatabaseId, &rows);
	fold->rows = rows;
	for (int i = 0; i < nrows; i++)
		if (minute_of(rows[i].folded_at) < minute_of(now) &&
			get_rel_name(rows[i].store) != NULL)
			rows[fold->nrows++] = rows[i];
	if (fold->nrows == 0)
		return;

	table = idem_store_name(relid);
	command = insert_command(table);
	rel = table_open(relid, RowExclusiveLock);
	GetUserIdAndSecContext(&save_userid, &save_sec_context);
	SetUserIdAndSecContext(rel->rd_rel->relowner,
						   save_sec_context | SECURITY_RESTRICTED_OPERATION);
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	for (int i = 0; i < fold->nrows; i++)
		if (has_counted(&rows[i]))
			insert_row(command, &rows[i], now);
	if (SPI_execute(psprintf("DELETE FROM %s WHERE minute OPERATOR(pg_catalog.<)"
							 " (pg_catalog.now() OPERATOR(pg_catalog.-)"
							 " interval '" KEEP "')", table), false,
					0) != SPI_OK_DELETE)
		elog(ERROR, "could not delete from %s", table);
	SPI_finish();
	SetUserIdAndSecContext(save_userid, save_sec_context);
	table_close(rel, NoLock);

	fold->now = now;
}

/*
 * The folding is committed.
 */
void
idem_history_folded(const IdemFold *fold)
{
	for (int i = 0; i < fold->nrows; i++)
		idem_stats_set_folded(&fold->rows[i], fold->now);
}

/*
 * Log the spikes that begin in the minutes just folded: once an episode.
 */
void
idem_history_log_spikes(const IdemFold *fold)
{
	Oid			schema = idem_extension_schema();
	Oid			view = OidIsValid(schema) ?
		get_relname_relid(SPIKES_VIEW, schema) : InvalidOid;
	char	   *name;
	char	   *command;
	Relation	rel;
	Oid			save_userid;
	int			save_sec_context;

	if (fold->nrows == 0 || !OidIsValid(view))
		return;
	name = idem_store_name(view);
	command = psprintf("SELECT suppressed, threshold FROM %s"
					   " WHERE minute OPERATOR(pg_catalog.=) $1"
					   " AND store OPERATOR(pg_catalog.=) $2"
					   " AND origin OPERATOR(pg_catalog.=) $3"
					   " AND NOT EXISTS (SELECT FROM %s"
					   " WHERE minute OPERATOR(pg_catalog.<) $1"
					   " AND minute OPERATOR(pg_catalog.>=) ($1"
					   " OPERATOR(pg_catalog.-) interval '" EPISODE_GAP "')"
					   " AND store OPERATOR(pg_catalog.=) $2"
					   " AND origin OPERATOR(pg_catalog.=) $3)", name, name);
	rel = table_open(view, AccessShareLock);
	GetUserIdAndSecContext(&save_userid, &save_sec_context);
	SetUserIdAndSecContext(rel->rd_rel->relowner,
						   save_sec_context | SECURITY_RESTRICTED_OPERATION);
	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");
	for (int i = 0; i < fold->nrows; i++)
	{
		Oid			types[3] = {TIMESTAMPTZOID, OIDOID, TEXTOID};
		Datum		args[3];
		HeapTuple	tuple;
		TupleDesc	desc;

		args[0] = TimestampTzGetDatum(minute_of(fold->rows[i].folded_at));
		args[1] = ObjectIdGetDatum(fold->rows[i].store);
		args[2] = CStringGetTextDatum(idem_database_origin());
		if (SPI_execute_with_args(command, 3, types, args, NULL, true, 1) !=
			SPI_OK_SELECT)
			elog(ERROR, "could not read %s", name);
		if (SPI_processed == 0)
			continue;
		tuple = SPI_tuptable->vals[0];
		desc = SPI_tuptable->tupdesc;
		ereport(LOG,
				(errmsg("spike of suppressed duplicates in store %s",
						idem_store_name(fold->rows[i].store)),
				 errdetail("There were %s in a minute; the trailing baseline makes %s the threshold.",
						   SPI_getvalue(tuple, desc, 1),
						   SPI_getvalue(tuple, desc, 2)),
				 errhint("The view idem_stat_keys shows the keys that are replayed most; this is logged once an episode.")));
	}
	SPI_finish();
	SetUserIdAndSecContext(save_userid, save_sec_context);
	table_close(rel, NoLock);
}
