/*-------------------------------------------------------------------------
 *
 * compat.h
 *	  Differences between PostgreSQL 15 to 19, as inline wrappers.
 *
 * This is the only file that looks at PG_VERSION_NUM.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_COMPAT_H
#define IDEM_COMPAT_H

#include "access/genam.h"
#include "access/relscan.h"
#include "access/tableam.h"
#include "catalog/pg_class.h"
#include "catalog/pg_proc.h"
#include "executor/executor.h"
#include "fmgr.h"
#include "funcapi.h"
#include "nodes/bitmapset.h"
#include "nodes/parsenodes.h"
#include "parser/parse_relation.h"
#include "postmaster/bgworker.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "storage/proc.h"
#include "utils/acl.h"
#include "utils/regproc.h"
#if PG_VERSION_NUM >= 160000
#include "varatt.h"
#endif

#if PG_VERSION_NUM < 150000
#error "idem needs PostgreSQL 15 or later"
#endif

/* 18 added instrumentation, 19 added scan flags */
static inline IndexScanDesc
idem_index_beginscan(Relation heap, Relation index, Snapshot snapshot)
{
#if PG_VERSION_NUM >= 190000
	return index_beginscan(heap, index, snapshot, NULL, 1, 0, SO_NONE);
#elif PG_VERSION_NUM >= 180000
	return index_beginscan(heap, index, snapshot, NULL, 1, 0);
#else
	return index_beginscan(heap, index, snapshot, 1, 0);
#endif
}

/* 16 tells BRIN from indexes that need an entry for every version of a row */
#if PG_VERSION_NUM < 160000
typedef bool TU_UpdateIndexes;
#define TU_None			false
#define TU_All			true
#endif

/* 17 lets an access method (BRIN) keep state over many inserts */
static inline void
idem_index_insert_cleanup(Relation index, struct IndexInfo *info)
{
#if PG_VERSION_NUM >= 170000
	index_insert_cleanup(index, info);
#endif
}

/* 17 added "or a stronger mode" */
static inline bool
idem_lock_held(const LOCKTAG *tag, LOCKMODE mode)
{
#if PG_VERSION_NUM >= 170000
	return LockHeldByMe(tag, mode, false);
#else
	return LockHeldByMe(tag, mode);
#endif
}

/* 18 can log the lock that was not to be had */
static inline bool
idem_xact_wait_conditional(TransactionId xid)
{
#if PG_VERSION_NUM >= 180000
	return ConditionalXactLockTableWait(xid, false);
#else
	return ConditionalXactLockTableWait(xid);
#endif
}

/* 16 added the result relations */
static inline void
idem_epq_init(EPQState *epqstate, EState *estate)
{
#if PG_VERSION_NUM >= 160000
	EvalPlanQualInit(epqstate, estate, NULL, NIL, -1, NIL);
#else
	EvalPlanQualInit(epqstate, estate, NULL, NIL, -1);
#endif
}

/* 16 moved permissions out of the range table, 18 added pruning */
static inline void
idem_init_range_table(EState *estate, RangeTblEntry *rte, Bitmapset *updated)
{
#if PG_VERSION_NUM >= 160000
	List	   *perminfos = NIL;
	RTEPermissionInfo *perminfo = addRTEPermissionInfo(&perminfos, rte);

	perminfo->updatedCols = updated;
#endif
#if PG_VERSION_NUM >= 180000
	ExecInitRangeTable(estate, list_make1(rte), perminfos,
					   bms_make_singleton(1));
#elif PG_VERSION_NUM >= 160000
	ExecInitRangeTable(estate, list_make1(rte), perminfos);
#else
	rte->updatedCols = updated;
	ExecInitRangeTable(estate, list_make1(rte));
#endif
}

/* 16 added soft errors */
static inline List *
idem_parse_qualified_name(const char *name)
{
#if PG_VERSION_NUM >= 160000
	return stringToQualifiedNameList(name, NULL);
#else
	return stringToQualifiedNameList(name);
#endif
}

/* 16 has one checker for all kinds of objects */
static inline AclResult
idem_function_aclcheck(Oid function, Oid role)
{
#if PG_VERSION_NUM >= 160000
	return object_aclcheck(ProcedureRelationId, function, role, ACL_EXECUTE);
#else
	return pg_proc_aclcheck(function, role, ACL_EXECUTE);
#endif
}

/* 19 ends such workers when their database is dropped or copied */
#ifdef BGWORKER_INTERRUPTIBLE
#define IDEM_BGWORKER_INTERRUPTIBLE BGWORKER_INTERRUPTIBLE
#else
#define IDEM_BGWORKER_INTERRUPTIBLE 0
#endif

static inline bool
idem_table_ownercheck(Oid relid, Oid role)
{
#if PG_VERSION_NUM >= 160000
	return object_ownercheck(RelationRelationId, relid, role);
#else
	return pg_class_ownercheck(relid, role);
#endif
}

/* 17 gave backends numbers from 0; before, the process array had them */
static inline int
idem_proc_number(void)
{
#if PG_VERSION_NUM >= 170000
	return MyProcNumber;
#else
	return MyProc->pgprocno;
#endif
}

#endif							/* IDEM_COMPAT_H */
