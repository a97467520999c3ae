/*-------------------------------------------------------------------------
 *
 * store.c
 *	  One store: open it, and cache what is known of it.
 *
 * The structure of a store is checked (structure.c) when it is first used in
 * a session and again after every invalidation of the table or one of its
 * partitions; in between the result is cached.  Callers get private copies.
 *
 * Locks: the caller of idem_store_open() gets the lock it asks for on the
 * partitioned table, charged to the current (sub)transaction, so that the
 * structure cannot change while a claim is open.  Partitions are locked only
 * for the time of the check.  Every entry point accepts invalidations itself,
 * because a lock that is already held does not.
 *
 * Invalidation: the relcache callback marks cached stores; it allocates
 * nothing and cannot fail.  A check during which the mark falls is repeated.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/pg_class.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/rls.h"
#include "utils/syscache.h"

#include "bookkeeping.h"
#include "store.h"

/* Cached result of a check */
typedef struct StoreEntry
{
	Oid			relid;			/* hash key */
	bool		valid;			/* no invalidation since the check began */
	IdemStore  *store;			/* in CacheMemoryContext, or NULL */
} StoreEntry;

static HTAB *store_cache = NULL;
static uint64 last_serial = 0;
static uint64 invalidations = 0;	/* of any store, as a quick test */

/*
 * Relcache callback: mark the stores that "relid" is or is a partition of
 * (all of them, if it is InvalidOid).
 */
static void
invalidate_stores(Datum arg, Oid relid)
{
	HASH_SEQ_STATUS status;
	StoreEntry *entry;

	hash_seq_init(&status, store_cache);
	while ((entry = (StoreEntry *) hash_seq_search(&status)) != NULL)
	{
		/* one that is just being checked has no list yet: be careful */
		bool		hit = relid == InvalidOid || relid == entry->relid ||
			entry->store == NULL;

		for (int i = 0; !hit && i < entry->store->nparts; i++)
			hit = entry->store->part[i].relid == relid;
		if (hit)
		{
			entry->valid = false;
			invalidations++;
		}
	}
}

/*
 * Once per process.
 */
void
idem_store_init(void)
{
	HASHCTL		ctl;

	ctl.keysize = sizeof(Oid);
	ctl.entrysize = sizeof(StoreEntry);
	store_cache = hash_create("idem stores", 16, &ctl, HASH_ELEM | HASH_BLOBS);
	CacheRegisterRelcacheCallback(invalidate_stores, (Datum) 0);
}

/*
 * The name of a store for messages, quoted and with its schema.
 */
char *
idem_store_name(Oid relid)
{
	char	   *name = get_rel_name(relid);
	char	   *schema = get_namespace_name(get_rel_namespace(relid));

	if (name == NULL)
		return psprintf("%u", relid);
	return quote_qualified_identifier(schema, name);
}

/*
 * The owner of a table, InvalidOid if it is gone.
 */
Oid
idem_table_owner(Oid relid)
{
	HeapTuple	tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relid));
	Oid			owner = InvalidOid;

	if (HeapTupleIsValid(tuple))
	{
		owner = ((Form_pg_class) GETSTRUCT(tuple))->relowner;
		ReleaseSysCache(tuple);
	}
	return owner;
}

/*
 * Does the server throw all caches away at every opportunity, for debugging?
 * Then an invalidation means nothing, and waiting for none would never end.
 */
static bool
discarding_caches(void)
{
#ifdef DISCARD_CACHES_ENABLED
	return debug_discard_caches > 0;
#else
	return false;
#endif
}

/*
 * The cached description of a store, checked anew if need be.
 */
static StoreEntry *
get_entry(Oid relid)
{
	StoreEntry *entry;
	bool		found;

	entry = hash_search(store_cache, &relid, HASH_ENTER, &found);
	if (!found)
	{
		entry->valid = false;
		entry->store = NULL;
	}

	while (!entry->valid)
	{
		IdemStore  *store;

		CHECK_FOR_INTERRUPTS();
		if (entry->store != NULL)
		{
			pfree(entry->store);
			entry->store = NULL;
		}
		entry->valid = true;	/* an invalidation from here on counts */
		PG_TRY();
		{
			store = idem_store_describe(relid);
			store->serial = ++last_serial;
			entry->store = MemoryContextAlloc(CacheMemoryContext,
											  IDEM_STORE_SIZE(store->nparts));
			memcpy(entry->store, store, IDEM_STORE_SIZE(store->nparts));
			entry->valid |= discarding_caches();
			pfree(store);
		}
		PG_CATCH();
		{
			hash_search(store_cache, &relid, HASH_REMOVE, NULL);
			PG_RE_THROW();
		}
		PG_END_TRY();
	}
	return entry;
}

/*
 * A private copy of the entry's description, with the current generation if
 * that was asked for.  Reading the bookkeeping can itself accept
 * invalidations, hence the loop.
 */
static IdemStore *
copy_store(Oid relid, bool want_current)
{
	StoreEntry *entry = get_entry(relid);
	IdemStore  *copy;
	int			current = entry->store->current;

	while (want_current && current == -1)
	{
		uint64		serial = entry->store->serial;
		IdemStoreState state;

		idem_state_read(relid, &state);
		entry = get_entry(relid);
		if (entry->store->serial == serial || discarding_caches())
			entry->store->current = current =
				state.current < entry->store->nparts ? state.current : 0;
		else
			current = entry->store->current;
	}

	copy = palloc(IDEM_STORE_SIZE(entry->store->nparts));
	memcpy(copy, entry->store, IDEM_STORE_SIZE(entry->store->nparts));
	copy->invalidations = invalidations;
	return copy;
}

/*
 * Privileges as GRANT wants them.
 */
static char *
privilege_names(AclMode privileges)
{
	static const struct
	{
		AclMode		mode;
		const char *name;
	}			names[] = {
		{ACL_SELECT, "SELECT"},
		{ACL_INSERT, "INSERT"},
		{ACL_UPDATE, "UPDATE"},
		{ACL_DELETE, "DELETE"},
	};
	StringInfoData buf;

	initStringInfo(&buf);
	for (int i = 0; i < lengthof(names); i++)
		if (privileges & names[i].mode)
			appendStringInfo(&buf, "%s%s", buf.len > 0 ? ", " : "",
							 names[i].name);
	return buf.data;
}

/*
 * Open a store: check the caller's privileges (all of "privileges" on the
 * partitioned table; row security that applies to the caller is a refusal),
 * lock it until the end of the (sub)transaction, check its structure.
 *
 * lockmode RowExclusiveLock is for callers that will write, and makes the
 * current generation known; AccessShareLock is for look-ups, and works on a
 * standby and in parallel workers.
 */
IdemStore *
idem_store_open(Oid relid, AclMode privileges, LOCKMODE lockmode)
{
	if (pg_class_aclmask(relid, GetUserId(), privileges, ACLMASK_ALL) !=
		privileges)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for store %s",
						idem_store_name(relid)),
				 errhint("The owner can GRANT %s ON %s.",
						 privilege_names(privileges),
						 idem_store_name(relid))));
	if (check_enable_rls(relid, InvalidOid, true) == RLS_ENABLED)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("row security applies to store %s",
						idem_store_name(relid)),
				 errdetail("A record that a policy hides would look like an operation that was never done."),
				 errhint("Call idem from a SECURITY DEFINER function that is owned by a role the policies do not apply to.")));

	return idem_store_open_unchecked(relid, lockmode);
}

/*
 * The same without asking who the caller is: for expiry.
 */
IdemStore *
idem_store_open_unchecked(Oid relid, LOCKMODE lockmode)
{
	ResourceOwner oldowner = CurrentResourceOwner;

	/* A lock charged to a portal would go away with a failed cursor */
	CurrentResourceOwner = CurTransactionResourceOwner;
	PG_TRY();
	{
		LockRelationOid(relid, lockmode);
	}
	PG_FINALLY();
	{
		CurrentResourceOwner = oldowner;
	}
	PG_END_TRY();
	AcceptInvalidationMessages();

	return copy_store(relid, lockmode == RowExclusiveLock);
}

/*
 * Is the store still what it was when "store" was made, by the invalidations
 * accepted so far?  Getting a new lock on a partition accepts them.
 */
bool
idem_store_unchanged(const IdemStore *store)
{
	StoreEntry *entry;

	if (store->invalidations == invalidations || discarding_caches())
		return true;
	entry = hash_search(store_cache, &store->relid, HASH_FIND, NULL);
	return entry != NULL && entry->valid && entry->store != NULL &&
		entry->store->serial == store->serial;
}

/*
 * Accept invalidations; if the store is not what it was when "store" was
 * made, free that and return a new copy, otherwise return it unchanged.
 */
IdemStore *
idem_store_refresh(IdemStore *store)
{
	Oid			relid = store->relid;
	bool		want_current = store->current != -1;

	AcceptInvalidationMessages();
	if (idem_store_unchanged(store))
		return store;
	pfree(store);
	return copy_store(relid, want_current);
}
