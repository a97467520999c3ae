/*-------------------------------------------------------------------------
 *
 * hotkeys.c
 *	  The keys that are replayed most often.
 *
 * A bounded number of counters for an unbounded number of keys, by the
 * algorithm Space-Saving (Metwally, Agrawal, El Abbadi: Efficient Computation
 * of Frequent and Top-k Elements in Data Streams, ICDT 2005): a key without a
 * counter takes over the smallest one, and its count goes on from there; that
 * start is its error.
 *
 * So for every key listed, count - error <= true number <= count.  With m
 * counters and n replays no error exceeds n / m, and every key with more than
 * n / m replays is listed.  Here keys are spread over partitions by their
 * hash, so m is PLACES and n are the replays of the key's own partition.
 *
 * When a store's keys are removed (reset, dropped), another key may find a
 * free counter although it had been displaced before.  "floor" is the largest
 * start there has been, and where such a key begins.
 *
 * Each partition has an LWLock, held for one pass over its counters; nothing
 * can fail meanwhile.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "miscadmin.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "hotkeys.h"
#include "key.h"
#include "stats.h"

StaticAssertDecl(IDEM_HOTKEY_SIZE == IDEM_KEY_MAX_BYTES, "a key must fit");

#define PLACES	64

typedef struct Partition
{
	uint64		floor;
	uint64		hashes[PLACES]; /* 0: free; a copy, to be scanned fast */
	uint64		counts[PLACES]; /* likewise */
	IdemHotKey	keys[PLACES];	/* count and hash are not used here */
} Partition;

static Partition *partitions = NULL;

static inline LWLock *
partition_lock(int i)
{
	return &idem_lwlocks[IDEM_HOTKEYS_LOCK + i].lock;
}

Size
idem_hotkeys_size(void)
{
	return mul_size(sizeof(Partition), IDEM_HOTKEYS_PARTITIONS);
}

void
idem_hotkeys_startup(void)
{
	bool		found;

	partitions = ShmemInitStruct("idem hot keys", idem_hotkeys_size(), &found);
	if (!found)
		memset(partitions, 0, idem_hotkeys_size());
}

static bool
same_key(const IdemHotKey *k, Oid store, Oid role, const text *key)
{
	return k->database == MyDatabaseId && k->store == store &&
		k->role == role && k->len == (int) VARSIZE_ANY_EXHDR(key) &&
		memcmp(k->key, VARDATA_ANY(key), k->len) == 0;
}

/*
 * Count a replay of a key with this idem_key_hash().
 */
void
idem_hotkeys_note(Oid store, const text *key, uint64 hash)
{
	Oid			role = GetSessionUserId();
	TimestampTz now = GetCurrentTimestamp();
	int			number;
	Partition  *p;
	int			smallest = 0;
	int			place = -1;

	if (partitions == NULL)
		return;
	hash = hash_combine64(hash, ((uint64) MyDatabaseId << 32) | role);
	hash = Max(hash, 1);
	number = hash % IDEM_HOTKEYS_PARTITIONS;
	p = &partitions[number];

	LWLockAcquire(partition_lock(number), LW_EXCLUSIVE);
	for (int i = 0; i < PLACES && place < 0; i++)
	{
		if (p->hashes[i] == hash && same_key(&p->keys[i], store, role, key))
			place = i;
		else if (p->counts[i] < p->counts[smallest])
			smallest = i;
	}
	if (place < 0)
	{
		IdemHotKey *k = &p->keys[smallest];

		place = smallest;
		p->floor = Max(p->floor, p->counts[place]);
		k->error = p->counts[place] > 0 ? p->counts[place] : p->floor;
		p->counts[place] = k->error;
		p->hashes[place] = hash;
		k->database = MyDatabaseId;
		k->store = store;
		k->role = role;
		k->len = VARSIZE_ANY_EXHDR(key);
		memcpy(k->key, VARDATA_ANY(key), k->len);
		k->first_at = now;
	}
	p->counts[place]++;
	p->keys[place].last_at = now;
	LWLockRelease(partition_lock(number));
}

/*
 * Remove the keys of a store.
 */
void
idem_hotkeys_forget(Oid database, Oid store)
{
	for (int n = 0; partitions != NULL && n < IDEM_HOTKEYS_PARTITIONS; n++)
	{
		Partition  *p = &partitions[n];
		bool		empty = true;

		LWLockAcquire(partition_lock(n), LW_EXCLUSIVE);
		for (int i = 0; i < PLACES; i++)
		{
			if (p->keys[i].database == database && p->keys[i].store == store)
			{
				p->hashes[i] = p->counts[i] = 0;
				p->keys[i].database = InvalidOid;
			}
			empty &= p->hashes[i] == 0;
		}
		if (empty)
			p->floor = 0;
		LWLockRelease(partition_lock(n));
	}
}

/*
 * Copy the counted keys of a database; returns how many.
 */
int
idem_hotkeys_read(Oid database, IdemHotKey **keys)
{
	int			nkeys = 0;

	*keys = palloc(sizeof(IdemHotKey) * PLACES * IDEM_HOTKEYS_PARTITIONS);
	for (int n = 0; partitions != NULL && n < IDEM_HOTKEYS_PARTITIONS; n++)
	{
		Partition  *p = &partitions[n];

		LWLockAcquire(partition_lock(n), LW_SHARED);
		for (int i = 0; i < PLACES; i++)
			if (p->keys[i].database == database && p->hashes[i] != 0)
			{
				(*keys)[nkeys] = p->keys[i];
				(*keys)[nkeys++].count = p->counts[i];
			}
		LWLockRelease(partition_lock(n));
	}
	return nkeys;
}
