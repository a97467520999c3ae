/*-------------------------------------------------------------------------
 *
 * round.c
 *	  A round of expiry over the stores of a database.
 *
 * Both the worker and CALL idem_expire() come through idem_round_step(),
 * which does one step of expiry.c for one store:
 *
 * - as the store's owner, in a security-restricted operation, with a search
 *	 path in which nothing of a user's comes first;
 * - in a subtransaction, so that an error (a trigger of the owner's, say)
 *	 disturbs no other store; it is noted in the bookkeeping, and a WARNING
 *	 is logged when it is a new one;
 * - with lock_timeout 100 ms, and synchronous_commit = local, since emptying
 *	 must not wait for a standby that is down.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "fmgr.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/resowner.h"

#include "bookkeeping.h"
#include "claim.h"
#include "compat.h"
#include "expiry.h"
#include "idem.h"
#include "round.h"
#include "store.h"
#include "worker.h"

PG_FUNCTION_INFO_V1(idem_expire);

/*
 * Set a parameter to the end of the current transaction.
 */
static void
set_local(const char *name, const char *value)
{
	(void) set_config_option(name, value, PGC_SUSET, PGC_S_SESSION,
							 GUC_ACTION_LOCAL, true, 0, false);
}

/*
 * Note why expiry of a store cannot go on (NULL: it can), and warn once.
 */
static void
note_trouble(Oid store, const char *message)
{
	IdemStoreState state;
	IdemStateValue value = {"trouble", (Datum) 0, TEXTOID, true};

	idem_state_read(store, &state);
	if (message == NULL ? state.trouble == NULL :
		state.trouble != NULL && strcmp(state.trouble, message) == 0)
		return;
	if (!idem_state_lock(store, false))
		return;
	/* No row is made for a table that nobody expires */
	if (message != NULL && !state.expires)
		return;
	if (message != NULL)
	{
		value.value = CStringGetTextDatum(message);
		value.isnull = false;
		ereport(WARNING,
				(errmsg("expiry of store %s cannot go on: %s",
						idem_store_name(store), message),
				 errhint("It is tried again in each round; this is logged once.")));
	}
	idem_state_update(store, &value, 1);
}

/*
 * What is noted of an error.  Everybody may read it, so no DETAIL, which can
 * hold keys and values, but that of structure.c; and it has a bounded length.
 */
static char *
trouble_of(const ErrorData *edata)
{
	char	   *text = edata->message;

	if (edata->sqlerrcode == ERRCODE_WRONG_OBJECT_TYPE &&
		edata->detail != NULL)
		text = psprintf("%s; %s", text, edata->detail);
	return pnstrdup(text, pg_mbcliplen(text, strlen(text), 500));
}

/*
 * Do one step of expiry for a store, in a transaction that has done nothing
 * else yet.  False if there was nothing (more) to do, or it failed.
 */
bool
idem_round_step(Oid store, IdemExpiryRound *round)
{
	MemoryContext caller_context = CurrentMemoryContext;
	MemoryContext context;
	ResourceOwner resource_owner = CurrentResourceOwner;
	int			ntried = round->ntried;
	Oid			owner = idem_table_owner(store);
	Oid			save_userid;
	int			save_sec_context;
	volatile bool progress = false;
	char	   *volatile trouble = NULL;

	if (!OidIsValid(owner))
		return false;			/* dropped */

	set_local("lock_timeout", "100ms");
	set_local("synchronous_commit", "local");
	set_local("search_path", "pg_catalog, pg_temp");
	set_local("row_security", "off");
	set_local("enable_seqscan", "off");
	set_local("jit", "off");	/* which the cost of a seqscan would trigger */

	context = AllocSetContextCreate(caller_context, "idem expiry step",
									ALLOCSET_DEFAULT_SIZES);
	GetUserIdAndSecContext(&save_userid, &save_sec_context);
	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		/* What a trigger sets must not outlive the step either */
		int			nestlevel = NewGUCNestLevel();

		SetUserIdAndSecContext(owner, save_sec_context |
							   SECURITY_RESTRICTED_OPERATION);
		progress = idem_expiry_step(store, round);
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

		/* a cancel by the user or an administrator goes on */
		if (edata->sqlerrcode == ERRCODE_QUERY_CANCELED &&
			!idem_in_worker)
			ReThrowError(edata);
		round->failed = true;
		/* the other generations can be tried, each in its turn */
		progress = round->ntried > ntried;
		/* somebody was in the way: no trouble, only not now */
		if (edata->sqlerrcode != ERRCODE_LOCK_NOT_AVAILABLE &&
			edata->sqlerrcode != ERRCODE_T_R_DEADLOCK_DETECTED &&
			edata->sqlerrcode != ERRCODE_T_R_SERIALIZATION_FAILURE)
			trouble = trouble_of(edata);
	}
	PG_END_TRY();

	/* It can have been dropped while the step waited */
	AcceptInvalidationMessages();
	if ((trouble != NULL || (!progress && !round->failed)) &&
		get_rel_name(store) != NULL)
		note_trouble(store, trouble);
	MemoryContextSwitchTo(caller_context);
	MemoryContextDelete(context);
	return progress;
}

/*
 * idem_expire(store regclass): a procedure
 *
 * The steps that are due, each in a transaction of its own: of one store, or
 * of all that the caller owns.
 */
Datum
idem_expire(PG_FUNCTION_ARGS)
{
	MemoryContext context;
	List	   *stores;
	ListCell   *lc;

	if (fcinfo->context == NULL || !IsA(fcinfo->context, CallContext) ||
		castNode(CallContext, fcinfo->context)->atomic)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_TRANSACTION_TERMINATION),
				 errmsg("idem_expire() cannot run inside a transaction block"),
				 errhint("CALL it on its own: each step is a transaction.")));
	idem_check_may_write("idem_expire()");

	/* Survives the transactions that follow, not the call */
	context = AllocSetContextCreate(PortalContext, "idem expire",
									ALLOCSET_DEFAULT_SIZES);
	MemoryContextSwitchTo(context);
	if (PG_ARGISNULL(0))
		stores = idem_state_stores();
	else
	{
		Oid			store = PG_GETARG_OID(0);

		if (get_rel_name(store) != NULL &&
			!idem_table_ownercheck(store, GetUserId()))
			ereport(ERROR,
					(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
					 errmsg("must be owner of store %s",
							idem_store_name(store)),
					 errhint("Ask the owner of the table, or a superuser.")));
		/* The rest is checked by the steps, which do not wait for long */
		if (get_rel_relkind(store) != RELKIND_PARTITIONED_TABLE)
			ereport(ERROR,
					(errcode(get_rel_name(store) == NULL ?
							 ERRCODE_UNDEFINED_TABLE :
							 ERRCODE_WRONG_OBJECT_TYPE),
					 errmsg("%s is not a store", idem_store_name(store)),
					 errhint("The view idem_stores lists the stores.")));
		stores = list_make1_oid(store);
	}

	if (SPI_connect_ext(SPI_OPT_NONATOMIC) != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect_ext failed");
	foreach(lc, stores)
	{
		Oid			store = lfirst_oid(lc);
		IdemExpiryRound round;
		bool		more = true;

		memset(&round, 0, sizeof(round));
		while (more)
		{
			CHECK_FOR_INTERRUPTS();
			SPI_commit();
			/* whatever the session's default: one snapshot a command */
			set_local("transaction_isolation", "read committed");
			MemoryContextSwitchTo(context);
			more = get_rel_name(store) != NULL &&
				idem_table_ownercheck(store, GetUserId()) &&
				idem_round_step(store, &round);
		}
	}
	SPI_commit();
	SPI_finish();
	PG_RETURN_VOID();
}
