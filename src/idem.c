/*-------------------------------------------------------------------------
 *
 * idem.c
 *	  Module entry: settings and callbacks.
 *
 * idem works without shared_preload_libraries, all but statistics, the launcher
 * and its workers: the module is then loaded by the first call of one of its
 * functions in a session.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>

#include "fmgr.h"
#include "utils/guc.h"

#include "idem.h"
#include "pending.h"
#include "stats.h"
#include "store.h"
#include "worker.h"

PG_MODULE_MAGIC;

int			idem_wait_timeout = 10000;
#ifdef USE_ASSERT_CHECKING
bool		idem_debug_lock_collisions = false;
#endif

void		_PG_init(void);

/*
 * Module load callback.  Runs once in a process: in the postmaster when idem
 * is preloaded, otherwise in the session that first needs it.
 */
void
_PG_init(void)
{
	DefineCustomIntVariable("idem.wait_timeout",
							"Sets how long a claim waits for the same operation in flight.",
							"-1 means no limit of its own, 0 means not to wait.",
							&idem_wait_timeout,
							10000,
							-1,
							INT_MAX,
							PGC_USERSET,
							GUC_UNIT_MS,
							NULL,
							NULL,
							NULL);

#ifdef USE_ASSERT_CHECKING
	DefineCustomBoolVariable("idem.debug_lock_collisions",
							 "Gives every key the same lock, to test collisions.",
							 NULL,
							 &idem_debug_lock_collisions,
							 false,
							 PGC_USERSET,
							 GUC_NOT_IN_SAMPLE,
							 NULL,
							 NULL,
							 NULL);
#endif

	idem_stats_init();
	idem_launcher_init();
	MarkGUCPrefixReserved("idem");

	idem_store_init();
	idem_pending_init();
}
