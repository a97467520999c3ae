/*-------------------------------------------------------------------------
 *
 * launcher.c
 *	  Visits each database in turn with a short-lived worker.
 *
 * The launcher is a static background worker, connected to the shared
 * catalogs only, started when recovery is over (so also on promotion).  Per
 * cycle of idem.naptime it starts one worker at a time (worker.c) in each
 * connectable database that is no template, and waits for it.  A database
 * without the extension is remembered, and visited again only in every
 * VISIT_WITHOUT-th cycle, or when CREATE EXTENSION has poked the launcher.
 *
 * It never exits with code 0, which would mean that it is not to be started
 * again; on SIGTERM it leaves with 1, and the postmaster starts a new one
 * unless it is shutting down.  An error (a catalog that cannot be read, say)
 * ends the process the same way.
 *
 * Shared memory: one struct, written by the launcher, the one worker that
 * runs, and CREATE EXTENSION.  The launcher's pid is set under the spinlock;
 * nothing else is done while it is held.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "port/atomics.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "storage/shmem.h"
#include "storage/spin.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "stats.h"
#include "worker.h"

/* A database without the extension is visited in one cycle out of so many */
#define VISIT_WITHOUT	10

/* Milliseconds after which a worker that has not ended is terminated */
#define WORKER_TIME		2500

/* Seconds until the postmaster starts a launcher that has left */
#define RESTART_AFTER	5

typedef struct LauncherShared
{
	slock_t		mutex;
	pid_t		pid;			/* of the launcher, 0: none; under mutex */
	pg_atomic_uint32 poked;		/* set by CREATE EXTENSION: for so many cycles
								 * any database may have it now; counted down
								 * by the launcher */
	pg_atomic_uint32 visited;	/* set by the worker: 1 with, 2 without the
								 * extension; cleared by the launcher before */
} LauncherShared;

/* What the launcher remembers of a database */
typedef struct Visit
{
	Oid			database;		/* hash key */
	bool		without;		/* had no extension at the last visit */
	uint64		cycle;			/* when it was last visited */
	bool		seen;			/* is there in this cycle */
} Visit;

int			idem_naptime = 60;
bool		idem_worker_enabled = true;

static LauncherShared *shared = NULL;
static bool extension_created = false;	/* in this transaction */
static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;

static void
shmem_request(void)
{
	if (prev_shmem_request_hook)
		prev_shmem_request_hook();
	RequestAddinShmemSpace(MAXALIGN(sizeof(LauncherShared)));
}

static void
shmem_startup(void)
{
	bool		found;

	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	shared = ShmemInitStruct("idem launcher", sizeof(LauncherShared), &found);
	if (!found)
	{
		SpinLockInit(&shared->mutex);
		shared->pid = 0;
		pg_atomic_init_u32(&shared->poked, 0);
		pg_atomic_init_u32(&shared->visited, 0);
	}
	LWLockRelease(AddinShmemInitLock);
}

/*
 * Settings everywhere; with preload also shared memory and the launcher.
 */
void
idem_launcher_init(void)
{
	BackgroundWorker worker;

	DefineCustomIntVariable("idem.naptime",
							"Sets the time between two visits of the worker to a database.",
							NULL,
							&idem_naptime,
							60,
							1,
							INT_MAX / 1000,
							PGC_SIGHUP,
							GUC_UNIT_S,
							NULL,
							NULL,
							NULL);
	DefineCustomBoolVariable("idem.worker",
							 "Lets the worker expire records in the background.",
							 NULL,
							 &idem_worker_enabled,
							 true,
							 PGC_SIGHUP,
							 0,
							 NULL,
							 NULL,
							 NULL);

	if (!process_shared_preload_libraries_in_progress)
		return;

	prev_shmem_request_hook = shmem_request_hook;
	shmem_request_hook = shmem_request;
	prev_shmem_startup_hook = shmem_startup_hook;
	shmem_startup_hook = shmem_startup;

	/* pg_upgrade: nothing may change behind its back */
	if (IsBinaryUpgrade)
		return;

	memset(&worker, 0, sizeof(worker));
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS |
		BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = RESTART_AFTER;
	strlcpy(worker.bgw_library_name, "idem", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "idem_launcher_main", BGW_MAXLEN);
	strlcpy(worker.bgw_name, "idem launcher", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "idem launcher", BGW_MAXLEN);
	RegisterBackgroundWorker(&worker);
}

bool
idem_is_preloaded(void)
{
	return shared != NULL;
}

/*
 * Is there a launcher?  Only for a server that has idem preloaded.
 */
bool
idem_launcher_running(void)
{
	pid_t		pid;

	SpinLockAcquire(&shared->mutex);
	pid = shared->pid;
	SpinLockRelease(&shared->mutex);
	return pid != 0;
}

/*
 * At the end of the transaction of CREATE EXTENSION: have the launcher look
 * here, or say that there is none.  Not earlier, since the extension is only
 * there once it is committed, and the script's messages are not shown.
 */
static void
welcome_callback(XactEvent event, void *arg)
{
	if (!extension_created)
		return;
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
			if (shared == NULL && OidIsValid(get_extension_oid("idem", true)))
				ereport(NOTICE,
						(errmsg("idem is not in \"shared_preload_libraries\""),
						 errdetail("Everything works but statistics and the worker that expires old records."),
						 errhint("Add it and restart the server, or CALL idem_expire() from time to time.")));
			break;
		case XACT_EVENT_COMMIT:
			extension_created = false;
			if (shared != NULL)
				pg_atomic_write_u32(&shared->poked, 2);
			break;
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PREPARE:
			extension_created = false;
			break;
		default:
			break;
	}
}

/*
 * CREATE EXTENSION is under way in this transaction.
 */
void
idem_launcher_welcome(void)
{
	static bool registered = false;

	if (!registered)
		RegisterXactCallback(welcome_callback, NULL);
	registered = true;
	extension_created = true;
}

/*
 * The worker says what it found.
 */
void
idem_report_visit(bool has_extension)
{
	if (shared != NULL)
		pg_atomic_write_u32(&shared->visited, has_extension ? 1 : 2);
}

static void
set_launcher_pid(pid_t pid)
{
	SpinLockAcquire(&shared->mutex);
	shared->pid = pid;
	SpinLockRelease(&shared->mutex);
}

static void
on_launcher_exit(int code, Datum arg)
{
	set_launcher_pid(0);
}

/*
 * Sleep until the latch is set or the time is over; serves interrupts,
 * reloads and the request to leave.
 */
static void
launcher_wait(long timeout_ms)
{
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 timeout_ms, PG_WAIT_EXTENSION);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
	if (ConfigReloadPending)
	{
		ConfigReloadPending = false;
		ProcessConfigFile(PGC_SIGHUP);
	}
	if (ShutdownRequestPending)
		proc_exit(1);
}

/*
 * The databases there are, in the hash table "visits"; those that went away
 * are removed from it.
 */
static void
list_databases(HTAB *visits)
{
	HASH_SEQ_STATUS status;
	Visit	   *visit;
	Relation	rel;
	SysScanDesc scan;
	HeapTuple	tuple;

	hash_seq_init(&status, visits);
	while ((visit = hash_seq_search(&status)) != NULL)
		visit->seen = false;

	StartTransactionCommand();
	(void) GetTransactionSnapshot();
	rel = table_open(DatabaseRelationId, AccessShareLock);
	scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_database database = (Form_pg_database) GETSTRUCT(tuple);
		bool		found;

		/* a negative limit marks one whose dropping was interrupted */
		if (!database->datallowconn || database->datistemplate ||
			database->datconnlimit < -1)
			continue;
		visit = hash_search(visits, &database->oid, HASH_ENTER, &found);
		if (!found)
		{
			visit->without = false;
			visit->cycle = 0;
		}
		visit->seen = true;
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	idem_stats_forget_databases();
	CommitTransactionCommand();

	hash_seq_init(&status, visits);
	while ((visit = hash_seq_search(&status)) != NULL)
		if (!visit->seen)
			(void) hash_search(visits, &visit->database, HASH_REMOVE, NULL);
}

/*
 * Run one worker in a database and wait for its end.  False if no worker
 * slot is to be had.
 */
static bool
visit_database(Visit *visit)
{
	BackgroundWorker worker;
	BackgroundWorkerHandle *handle;
	BgwHandleStatus status;
	TimestampTz start = DT_NOBEGIN;
	bool		terminated = false;
	pid_t		pid;

	pg_atomic_write_u32(&shared->visited, 0);
	memset(&worker, 0, sizeof(worker));
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS |
		BGWORKER_BACKEND_DATABASE_CONNECTION | IDEM_BGWORKER_INTERRUPTIBLE;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	strlcpy(worker.bgw_library_name, "idem", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "idem_worker_main", BGW_MAXLEN);
	strlcpy(worker.bgw_name, "idem worker", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "idem worker", BGW_MAXLEN);
	worker.bgw_main_arg = ObjectIdGetDatum(visit->database);
	worker.bgw_notify_pid = MyProcPid;
	if (!RegisterDynamicBackgroundWorker(&worker, &handle))
		return false;

	/*
	 * The postmaster sets our latch at each change.  A worker ends by itself
	 * in time, unless a trigger of some owner's swallows its cancellation;
	 * termination cannot be swallowed.
	 */
	while ((status = GetBackgroundWorkerPid(handle, &pid)) != BGWH_STOPPED)
	{
		if (status == BGWH_STARTED && start == DT_NOBEGIN)
			start = GetCurrentTimestamp();
		else if (status == BGWH_STARTED && !terminated &&
				 TimestampDifferenceExceeds(start, GetCurrentTimestamp(),
											WORKER_TIME))
		{
			TerminateBackgroundWorker(handle);
			terminated = true;
		}
		launcher_wait(100);
	}
	pfree(handle);

	switch (pg_atomic_read_u32(&shared->visited))
	{
		case 1:
			visit->without = false;
			break;
		case 2:
			visit->without = true;
			break;
		default:
			break;				/* could not connect, or was killed */
	}
	return true;
}

/*
 * The launcher's main program.
 */
void
idem_launcher_main(Datum main_arg)
{
	HASHCTL		ctl;
	HTAB	   *visits;
	uint64		cycle = 0;
	bool		no_slot_logged = false;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, SignalHandlerForShutdownRequest);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnectionByOid(InvalidOid, InvalidOid, 0);
	idem_pin_settings();

	before_shmem_exit(on_launcher_exit, 0);
	set_launcher_pid(MyProcPid);

	ctl.keysize = sizeof(Oid);
	ctl.entrysize = sizeof(Visit);
	ctl.hcxt = TopMemoryContext;
	visits = hash_create("idem visits", 16, &ctl,
						 HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);

	for (;;)
	{
		TimestampTz start = GetCurrentTimestamp();
		HASH_SEQ_STATUS status;
		Visit	   *visit;
		List	   *due = NIL;
		ListCell   *lc;
		bool		poked = pg_atomic_read_u32(&shared->poked) > 0;
		long		rest;

		cycle++;
		if (poked)
			pg_atomic_fetch_sub_u32(&shared->poked, 1);
		if (idem_worker_enabled)
			list_databases(visits);
		hash_seq_init(&status, visits);
		while ((visit = hash_seq_search(&status)) != NULL)
			if (idem_worker_enabled &&
				(poked || !visit->without ||
				 visit->cycle + VISIT_WITHOUT <= cycle))
				due = lappend(due, visit);

		foreach(lc, due)
		{
			visit = lfirst(lc);
			visit->cycle = cycle;
			if (!idem_worker_enabled)
				break;
			if (visit_database(visit))
				no_slot_logged = false;
			else
			{
				if (!no_slot_logged)
					ereport(LOG,
							(errmsg("idem has no worker slot to expire records with"),
							 errhint("Consider increasing the configuration parameter \"max_worker_processes\".")));
				no_slot_logged = true;
				break;
			}
		}
		list_free(due);

		/* The naptime counts from one start to the next, and can change */
		do
		{
			rest = (long) (idem_naptime * INT64CONST(1000) -
						   (GetCurrentTimestamp() - start) / 1000);
			launcher_wait(Min(Max(rest, 10), 10000));
		} while (rest > 10);
	}
}
