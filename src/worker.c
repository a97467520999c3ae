/*-------------------------------------------------------------------------
 *
 * worker.c
 *	  One round of expiry in one database, by a process of its own; then the
 *	  minute's counters are folded into idem_history.
 *
 * The process ends after ROUND_TIME at the latest, counting a step that is
 * cancelled at STEP_TIME: DROP DATABASE, CREATE DATABASE ... TEMPLATE and the
 * like wait 5 seconds for others to leave, so they succeed untouched.  What
 * was not done is due again in the next round.
 *
 * Whatever a superuser or the database has set for ordinary sessions must
 * not matter here, so everything that could is pinned.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"

#include "bookkeeping.h"
#include "compat.h"
#include "expiry.h"
#include "history.h"
#include "round.h"
#include "stats.h"
#include "worker.h"

/* Milliseconds */
#define ROUND_TIME	1000
#define STEP_TIME	1000

bool		idem_in_worker = false;

/*
 * For the launcher, too.
 */
void
idem_pin_settings(void)
{
	static const char *const settings[][2] = {
		{"default_transaction_isolation", "read committed"},
		{"default_transaction_read_only", "off"},
		{"default_transaction_deferrable", "off"},
		{"session_replication_role", "origin"},
		{"search_path", "pg_catalog, pg_temp"},
		{"statement_timeout", "0"},
		{"lock_timeout", "100ms"},
		{"idle_in_transaction_session_timeout", "0"},
		{"transaction_timeout", "0"},
		{"synchronous_commit", "local"},
		{"row_security", "off"},
		{"jit", "off"},
	};

	for (int i = 0; i < lengthof(settings); i++)
		if (GetConfigOption(settings[i][0], true, false) != NULL)
			SetConfigOption(settings[i][0], settings[i][1], PGC_SUSET,
							PGC_S_OVERRIDE);
}

static void
begin_step(const char *activity)
{
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	pgstat_report_activity(STATE_RUNNING, activity);
	enable_timeout_after(STATEMENT_TIMEOUT, STEP_TIME);
}

static void
end_step(void)
{
	disable_timeout(STATEMENT_TIMEOUT, false);
	QueryCancelPending = false; /* it may have fired just now */
	PopActiveSnapshot();
	CommitTransactionCommand();
	pgstat_report_activity(STATE_IDLE, NULL);
}

/*
 * The worker's main program; the argument is the database's oid.
 */
void
idem_worker_main(Datum main_arg)
{
	MemoryContext context;
	TimestampTz end;
	List	   *stores = NIL;
	bool		has_extension;

	idem_in_worker = true;
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnectionByOid(DatumGetObjectId(main_arg),
											  InvalidOid, 0);
	idem_pin_settings();
	context = AllocSetContextCreate(TopMemoryContext, "idem worker",
									ALLOCSET_DEFAULT_SIZES);
	end = GetCurrentTimestamp() + ROUND_TIME * INT64CONST(1000);

	begin_step("looking for stores");
	idem_stats_forget_tables();
	has_extension = OidIsValid(get_extension_oid("idem", true));
	if (has_extension)
	{
		MemoryContextSwitchTo(context);
		idem_state_forget_dropped();
		stores = idem_state_stores();
	}
	end_step();
	idem_report_visit(has_extension);

	/* Not always in the same order, in case time does not suffice for all */
	for (int i = 0; i < list_length(stores); i++)
	{
		Oid			store = list_nth_oid(stores, (i + end % 1000) %
										 list_length(stores));
		IdemExpiryRound round;
		bool		more = true;

		memset(&round, 0, sizeof(round));
		while (more && GetCurrentTimestamp() < end)
		{
			CHECK_FOR_INTERRUPTS();
			begin_step("expiring records");
			MemoryContextSwitchTo(context);
			more = idem_round_step(store, &round);
			end_step();
		}
	}

	if (has_extension)
	{
		IdemFold	fold;

		begin_step("folding statistics");
		MemoryContextSwitchTo(context);
		idem_history_fold(&fold);
		end_step();
		idem_history_folded(&fold);

		begin_step("looking for spikes");
		MemoryContextSwitchTo(context);
		idem_history_log_spikes(&fold);
		end_step();
	}
}
