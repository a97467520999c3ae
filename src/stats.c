/*-------------------------------------------------------------------------
 *
 * stats.c
 *	  Counters of each store, in shared memory.
 *
 * The table of entries has a fixed size.  An entry belongs to one store of
 * one database and is named by its place; 0 stands for "none", which is also
 * the answer without preload, with idem.track off, and when the table is
 * full; that is counted.
 *
 * Counting takes no lock: a session remembers the place of each store, sees
 * that the entry is still that store's, and adds with an atomic operation.
 * Entries are made and removed under one LWLock, under which nothing can
 * fail.  Nobody counts for a store that is being removed: it has been
 * dropped, or its database has.
 *
 * What is counted when: an answer when it is given, whatever becomes of the
 * transaction; what a claim has come to when its transaction ends, from the
 * callbacks of pending.c, which rely on idem_stats_add() neither allocating
 * nor failing.
 *
 * idem_stat_reset() does not touch a counter.  It remembers what they were,
 * and so does the worker when it folds them into idem_history; so neither
 * loses anything that is counted meanwhile.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "port/atomics.h"
#include "storage/ipc.h"
#include "storage/lmgr.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/guc.h"
#include "utils/hsearch.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "activity.h"
#include "answer.h"
#include "compat.h"
#include "hotkeys.h"
#include "key.h"
#include "keylooks.h"
#include "stats.h"

#define LWLOCK_TRANCHE		"idem"

/* A key out of so many is looked at, the first of a session always */
#define SAMPLE_EVERY		16

typedef struct StatsEntry
{
	pg_atomic_uint64 counters[COUNT_N]; /* anybody adds */
	pg_atomic_uint64 wait_usecs_max;	/* anybody raises */
	pg_atomic_uint64 base[COUNT_N]; /* under the lock */
	pg_atomic_uint64 folded[COUNT_N];	/* the one worker that runs */
	pg_atomic_uint64 reset_at;	/* under the lock */
	pg_atomic_uint64 folded_at; /* the one worker that runs */
} StatsEntry;

typedef struct StatsShared
{
	const char *origin;			/* where the counters started; static text */
	pg_atomic_uint64 overflowed;	/* answers that had no entry */
	pg_atomic_uint32 removals;	/* grows whenever a place becomes free */

	/* Database and store, 0: free; changed under the lock, read by anybody */
	pg_atomic_uint64 owner[IDEM_STATS_CAPACITY];
	StatsEntry	entry[IDEM_STATS_CAPACITY];
} StatsShared;

/* What a session remembers of a store */
typedef struct CachedSlot
{
	Oid			store;			/* hash key */
	int			slot;			/* 0: the table was full … */
	uint32		removals;		/* … after so many removals */
} CachedSlot;

bool		idem_track = true;
LWLockPadded *idem_lwlocks = NULL;

static StatsShared *shared = NULL;
static HTAB *cache = NULL;
static CachedSlot *last_found = NULL;
static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;

static inline uint64
owner_of(Oid database, Oid store)
{
	return ((uint64) database << 32) | store;
}

static inline LWLock *
table_lock(void)
{
	return &idem_lwlocks[IDEM_STATS_LOCK].lock;
}

/*
 * Give a free place to a store.  Its counters start from "row", or from zero.
 */
static void
fill_entry(int slot, uint64 owner, const IdemStatsRow *row, TimestampTz now)
{
	StatsEntry *e = &shared->entry[slot - 1];

	for (int i = 0; i < COUNT_N; i++)
	{
		pg_atomic_write_u64(&e->counters[i], row ? row->counters[i] : 0);
		pg_atomic_write_u64(&e->base[i], row ? row->base[i] : 0);
		pg_atomic_write_u64(&e->folded[i], row ? row->folded[i] : 0);
	}
	pg_atomic_write_u64(&e->wait_usecs_max, row ? row->wait_usecs_max : 0);
	pg_atomic_write_u64(&e->reset_at, (uint64) (row ? row->reset_at : now));
	pg_atomic_write_u64(&e->folded_at, (uint64) (row ? row->folded_at : now));
	pg_write_barrier();
	pg_atomic_write_u64(&shared->owner[slot - 1], owner);
}

static void
read_entry(int slot, uint64 owner, IdemStatsRow *row)
{
	StatsEntry *e = &shared->entry[slot - 1];

	row->slot = slot;
	row->database = (Oid) (owner >> 32);
	row->store = (Oid) owner;
	for (int i = 0; i < COUNT_N; i++)
	{
		row->base[i] = pg_atomic_read_u64(&e->base[i]);
		row->folded[i] = pg_atomic_read_u64(&e->folded[i]);
		row->counters[i] = pg_atomic_read_u64(&e->counters[i]);
	}
	row->wait_usecs_max = pg_atomic_read_u64(&e->wait_usecs_max);
	row->reset_at = (TimestampTz) pg_atomic_read_u64(&e->reset_at);
	row->folded_at = (TimestampTz) pg_atomic_read_u64(&e->folded_at);
}

/*
 * At a clean shutdown, in the postmaster or the single-user backend.
 */
static void
shmem_exit_callback(int code, Datum arg)
{
	IdemStatsRow *rows;
	int			nrows = 0;

	if (code != 0 || shared == NULL)
		return;
	rows = calloc(IDEM_STATS_CAPACITY, sizeof(IdemStatsRow));
	if (rows == NULL)
		return;
	for (int slot = 1; slot <= IDEM_STATS_CAPACITY; slot++)
	{
		uint64		owner = pg_atomic_read_u64(&shared->owner[slot - 1]);

		if (owner != 0)
			read_entry(slot, owner, &rows[nrows++]);
	}
	idem_stats_file_write(rows, nrows);
	free(rows);
}

static void
shmem_request(void)
{
	if (prev_shmem_request_hook)
		prev_shmem_request_hook();
	RequestAddinShmemSpace(MAXALIGN(sizeof(StatsShared)));
	RequestAddinShmemSpace(idem_activity_size());
	RequestAddinShmemSpace(idem_hotkeys_size());
	RequestNamedLWLockTranche(LWLOCK_TRANCHE, IDEM_N_LWLOCKS);
}

/*
 * A fresh table, filled from the file that the last clean shutdown left.
 */
static void
fill_shared(void)
{
	TimestampTz now = GetCurrentTimestamp();
	IdemStatsRow *rows;
	int			nrows;

	pg_atomic_init_u64(&shared->overflowed, 0);
	pg_atomic_init_u32(&shared->removals, 0);
	for (int i = 0; i < IDEM_STATS_CAPACITY; i++)
	{
		StatsEntry *e = &shared->entry[i];

		pg_atomic_init_u64(&shared->owner[i], 0);
		for (int c = 0; c < COUNT_N; c++)
		{
			pg_atomic_init_u64(&e->counters[c], 0);
			pg_atomic_init_u64(&e->base[c], 0);
			pg_atomic_init_u64(&e->folded[c], 0);
		}
		pg_atomic_init_u64(&e->wait_usecs_max, 0);
		pg_atomic_init_u64(&e->reset_at, 0);
		pg_atomic_init_u64(&e->folded_at, 0);
	}

	rows = palloc(sizeof(IdemStatsRow) * IDEM_STATS_CAPACITY);
	nrows = idem_stats_file_read(rows, IDEM_STATS_CAPACITY, &shared->origin);
	for (int i = 0; i < nrows; i++)
		fill_entry(i + 1, owner_of(rows[i].database, rows[i].store), &rows[i],
				   now);
	pfree(rows);
}

static void
shmem_startup(void)
{
	bool		found;

	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	idem_lwlocks = GetNamedLWLockTranche(LWLOCK_TRANCHE);
	shared = ShmemInitStruct("idem counters", sizeof(StatsShared), &found);
	idem_activity_startup();
	idem_hotkeys_startup();
	LWLockRelease(AddinShmemInitLock);

	/* Nobody else runs yet, so what can fail is done without the lock */
	if (!found)
		fill_shared();
	if (!IsUnderPostmaster)
		on_shmem_exit(shmem_exit_callback, (Datum) 0);
}

/*
 * The setting everywhere; with preload also shared memory.
 */
void
idem_stats_init(void)
{
	DefineCustomBoolVariable("idem.track",
							 "Counts what becomes of claims, per store.",
							 "Needs idem in shared_preload_libraries.",
							 &idem_track,
							 true,
							 PGC_SUSET,
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
}

bool
idem_stats_available(void)
{
	return shared != NULL;
}

/*
 * Find the place of an owner, or give it a free one; 0 if there is none.
 */
static int
find_or_make(uint64 owner)
{
	TimestampTz now = GetCurrentTimestamp();
	int			free_slot = 0;
	int			slot = 0;

	LWLockAcquire(table_lock(), LW_EXCLUSIVE);
	for (int i = 0; i < IDEM_STATS_CAPACITY && slot == 0; i++)
	{
		uint64		there = pg_atomic_read_u64(&shared->owner[i]);

		if (there == owner)
			slot = i + 1;
		else if (there == 0 && free_slot == 0)
			free_slot = i + 1;
	}
	if (slot == 0 && free_slot != 0)
	{
		fill_entry(free_slot, owner, NULL, now);
		slot = free_slot;
	}
	LWLockRelease(table_lock());
	return slot;
}

/*
 * The place of a store's counters, 0 for none.  To be called where an error
 * is harmless, and for existing stores only.
 */
int
idem_stats_find(Oid store)
{
	uint64		owner = owner_of(MyDatabaseId, store);
	CachedSlot *cached = last_found;
	uint32		removals;
	bool		found = true;

	if (shared == NULL || !idem_track)
		return 0;

	if (cached == NULL || cached->store != store)
	{
		if (cache == NULL)
		{
			HASHCTL		ctl;

			ctl.keysize = sizeof(Oid);
			ctl.entrysize = sizeof(CachedSlot);
			ctl.hcxt = TopMemoryContext;
			cache = hash_create("idem counters", 16, &ctl,
								HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
		}
		cached = hash_search(cache, &store, HASH_ENTER, &found);
		last_found = cached;
	}
	if (found && cached->slot > 0 &&
		pg_atomic_read_u64(&shared->owner[cached->slot - 1]) == owner)
		return cached->slot;

	removals = pg_atomic_read_u32(&shared->removals);
	if (!found || cached->slot > 0 || cached->removals != removals)
	{
		cached->slot = find_or_make(owner);
		cached->removals = removals;
	}
	if (cached->slot == 0)
		pg_atomic_fetch_add_u64(&shared->overflowed, 1);
	return cached->slot;
}

/*
 * Count.  Cannot fail, allocates nothing, takes no lock.
 */
void
idem_stats_add(int slot, Oid store, IdemCounter counter, uint64 n)
{
	if (slot == 0 || n == 0 ||
		pg_atomic_read_u64(&shared->owner[slot - 1]) !=
		owner_of(MyDatabaseId, store))
		return;
	pg_atomic_fetch_add_u64(&shared->entry[slot - 1].counters[counter],
							(int64) n);
}

/*
 * Count a wait that is over.  Cannot fail, as idem_stats_add().
 */
void
idem_stats_wait(int slot, Oid store, int64 elapsed)
{
	uint64		usecs = Max(elapsed, 0);	/* clocks can be stepped back */
	pg_atomic_uint64 *max;
	uint64		old;

	if (slot == 0)
		return;
	idem_stats_add(slot, store, COUNT_WAITS, 1);
	idem_stats_add(slot, store, COUNT_WAIT_USECS, usecs);
	max = &shared->entry[slot - 1].wait_usecs_max;
	old = pg_atomic_read_u64(max);
	while (old < usecs && !pg_atomic_compare_exchange_u64(max, &old, usecs))
		;
}

/*
 * Now and then look at what a key is made of, for idem_health.
 */
static void
sample_key(int slot, Oid store, const char *key, int len)
{
	static uint32 seen = 0;

	if (seen++ % SAMPLE_EVERY != 0)
		return;
	idem_stats_add(slot, store, COUNT_KEYS_SAMPLED, 1);
	if (idem_key_looks_random(key, len))
		idem_stats_add(slot, store, COUNT_KEYS_RANDOM, 1);
	if (idem_key_looks_like_email(key, len))
		idem_stats_add(slot, store, COUNT_KEYS_EMAIL, 1);
}

/*
 * Count an answer.  What becomes of a claim or lease is counted when the
 * transaction ends, and a key the transaction holds already is no question.
 */
void
idem_stats_answer(int slot, Oid store, const text *key, int answer)
{
	if (slot == 0)
		return;
	switch ((IdemAnswer) answer)
	{
		case ANSWER_HELD:
			return;
		case ANSWER_COMPLETED:
			idem_stats_add(slot, store, COUNT_SUPPRESSED, 1);
			idem_hotkeys_note(store, key, idem_key_hash(store, key));
			break;
		case ANSWER_SKIPPED:
			idem_stats_add(slot, store, COUNT_SKIPPED, 1);
			break;
		case ANSWER_IN_PROGRESS:
			idem_stats_add(slot, store, COUNT_IN_PROGRESS, 1);
			break;
		case ANSWER_KEY_REUSED:
			idem_stats_add(slot, store, COUNT_KEY_REUSED, 1);
			break;
		case ANSWER_UNCERTAIN:
			idem_stats_add(slot, store, COUNT_UNCERTAIN, 1);
			break;
		case ANSWER_TOO_LATE:
			idem_stats_add(slot, store, COUNT_TOO_LATE, 1);
			break;
		default:
			break;
	}
	idem_stats_add(slot, store, COUNT_CLAIMS, 1);
	sample_key(slot, store, VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key));
}

/*
 * Copy the counters of a database's stores, or of all (InvalidOid).
 */
int
idem_stats_rows(Oid database, IdemStatsRow **rows)
{
	int			nrows = 0;
	int			size = 16;

	*rows = palloc(sizeof(IdemStatsRow) * size);
	for (int slot = 1; shared != NULL && slot <= IDEM_STATS_CAPACITY; slot++)
	{
		uint64		owner = pg_atomic_read_u64(&shared->owner[slot - 1]);

		if (owner == 0 ||
			(OidIsValid(database) && (Oid) (owner >> 32) != database))
			continue;
		if (nrows == size)
		{
			size *= 2;
			*rows = repalloc(*rows, sizeof(IdemStatsRow) * size);
		}
		pg_read_barrier();
		read_entry(slot, owner, &(*rows)[nrows]);
		pg_read_barrier();
		if (pg_atomic_read_u64(&shared->owner[slot - 1]) == owner)
			nrows++;
	}
	return nrows;
}

/*
 * Let a store of this database count from zero.
 */
void
idem_stats_reset(Oid store)
{
	uint64		owner = owner_of(MyDatabaseId, store);
	TimestampTz now = GetCurrentTimestamp();

	LWLockAcquire(table_lock(), LW_EXCLUSIVE);
	for (int i = 0; i < IDEM_STATS_CAPACITY; i++)
	{
		StatsEntry *e = &shared->entry[i];

		if (pg_atomic_read_u64(&shared->owner[i]) != owner)
			continue;
		for (int c = 0; c < COUNT_N; c++)
			pg_atomic_write_u64(&e->base[c],
								pg_atomic_read_u64(&e->counters[c]));
		pg_atomic_write_u64(&e->wait_usecs_max, 0);
		pg_atomic_write_u64(&e->reset_at, (uint64) now);
	}
	LWLockRelease(table_lock());
	idem_hotkeys_forget(MyDatabaseId, store);
}

/*
 * The worker has written all of "row" to idem_history.
 */
void
idem_stats_set_folded(const IdemStatsRow *row, TimestampTz at)
{
	StatsEntry *e = &shared->entry[row->slot - 1];

	if (pg_atomic_read_u64(&shared->owner[row->slot - 1]) !=
		owner_of(row->database, row->store))
		return;
	for (int c = 0; c < COUNT_N; c++)
		pg_atomic_write_u64(&e->folded[c], row->counters[c]);
	pg_atomic_write_u64(&e->folded_at, (uint64) at);
}

static void
remove_entry(const IdemStatsRow *row)
{
	uint64		owner = owner_of(row->database, row->store);

	LWLockAcquire(table_lock(), LW_EXCLUSIVE);
	if (pg_atomic_read_u64(&shared->owner[row->slot - 1]) == owner)
	{
		pg_atomic_write_u64(&shared->owner[row->slot - 1], 0);
		pg_atomic_fetch_add_u32(&shared->removals, 1);
	}
	LWLockRelease(table_lock());
	idem_hotkeys_forget(row->database, row->store);
}

/*
 * Remove the entries of tables that were dropped from this database.  One
 * that its creator has not committed yet is locked by that transaction.
 */
void
idem_stats_forget_tables(void)
{
	IdemStatsRow *rows;
	int			nrows = idem_stats_rows(MyDatabaseId, &rows);

	for (int i = 0; i < nrows; i++)
	{
		if (get_rel_name(rows[i].store) != NULL ||
			!ConditionalLockRelationOid(rows[i].store, AccessShareLock))
			continue;
		if (get_rel_name(rows[i].store) == NULL)
			remove_entry(&rows[i]);
		UnlockRelationOid(rows[i].store, AccessShareLock);
	}
	pfree(rows);
}

/*
 * Remove the entries of databases that were dropped.  In a transaction.
 */
void
idem_stats_forget_databases(void)
{
	IdemStatsRow *rows;
	int			nrows = idem_stats_rows(InvalidOid, &rows);

	for (int i = 0; i < nrows; i++)
		if (!SearchSysCacheExists1(DATABASEOID,
								   ObjectIdGetDatum(rows[i].database)))
			remove_entry(&rows[i]);
	pfree(rows);
}

/*
 * How many answers were not counted because the table was full.
 */
uint64
idem_stats_overflowed(void)
{
	return shared == NULL ? 0 : pg_atomic_read_u64(&shared->overflowed);
}

/*
 * How many places are taken.
 */
int
idem_stats_used(void)
{
	int			used = 0;

	for (int i = 0; shared != NULL && i < IDEM_STATS_CAPACITY; i++)
		used += pg_atomic_read_u64(&shared->owner[i]) != 0;
	return used;
}

/*
 * Where the counters started from when the server did.
 */
const char *
idem_stats_origin(void)
{
	return shared == NULL ? "" : shared->origin;
}
