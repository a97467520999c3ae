/*-------------------------------------------------------------------------
 *
 * stats.h
 *	  Counters of each store, in shared memory.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_STATS_H
#define IDEM_STATS_H

#include "datatype/timestamp.h"
#include "storage/lwlock.h"

/* What is counted; the order is that of idem_stat_counters() and the file */
typedef enum IdemCounter
{
	COUNT_CLAIMS,				/* questions that were answered */
	COUNT_EXECUTED,				/* completions that committed */
	COUNT_SUPPRESSED,			/* answered from a completion */
	COUNT_WAITS,
	COUNT_WAIT_USECS,
	COUNT_IN_PROGRESS,
	COUNT_KEY_REUSED,
	COUNT_TOO_LATE,
	COUNT_UNFINISHED,			/* COMMIT refused them, ID006 */
	COUNT_RELEASED,
	COUNT_ROLLED_BACK,
	COUNT_LEASES,
	COUNT_UNCERTAIN,
	COUNT_RETRIED,
	COUNT_SKIPPED,
	COUNT_RESOLVED,
	COUNT_KEYS_SAMPLED,			/* keys looked at, see sample_key() */
	COUNT_KEYS_RANDOM,
	COUNT_KEYS_EMAIL,
	COUNT_N
} IdemCounter;

/* A copy of one store's counters */
typedef struct IdemStatsRow
{
	int			slot;
	Oid			database;
	Oid			store;
	uint64		counters[COUNT_N];	/* since the entry was made */
	uint64		base[COUNT_N];	/* what they were at the last reset */
	uint64		folded[COUNT_N];	/* what is in idem_history already */
	uint64		wait_usecs_max;
	TimestampTz reset_at;
	TimestampTz folded_at;
} IdemStatsRow;

/* Of idem's LWLock tranche: the table of entries, then partitions */
#define IDEM_STATS_LOCK			0
#define IDEM_HOTKEYS_LOCK		1
#define IDEM_HOTKEYS_PARTITIONS	16
#define IDEM_N_LWLOCKS			(IDEM_HOTKEYS_LOCK + IDEM_HOTKEYS_PARTITIONS)

#define IDEM_STATS_CAPACITY		2048

/* stats.c */
extern bool idem_track;
extern LWLockPadded *idem_lwlocks;
extern void idem_stats_init(void);
extern bool idem_stats_available(void);
extern int	idem_stats_find(Oid store);
extern void idem_stats_add(int slot, Oid store, IdemCounter counter,
						   uint64 n);
extern void idem_stats_answer(int slot, Oid store, const text *key,
							  int answer);
extern void idem_stats_wait(int slot, Oid store, int64 usecs);
extern int	idem_stats_rows(Oid database, IdemStatsRow **rows);
extern void idem_stats_reset(Oid store);
extern void idem_stats_set_folded(const IdemStatsRow *row, TimestampTz at);
extern void idem_stats_forget_tables(void);
extern void idem_stats_forget_databases(void);
extern uint64 idem_stats_overflowed(void);
extern int	idem_stats_used(void);
extern const char *idem_stats_origin(void);

/* stats_file.c */
extern int	idem_stats_file_read(IdemStatsRow *rows, int capacity,
								 const char **origin);
extern void idem_stats_file_write(const IdemStatsRow *rows, int nrows);

#endif							/* IDEM_STATS_H */
