/*-------------------------------------------------------------------------
 *
 * worker.h
 *	  Launcher and worker: who runs expiry in the background.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_WORKER_H
#define IDEM_WORKER_H

/* launcher.c: settings */
extern int	idem_naptime;		/* seconds between two visits of a database */
extern bool idem_worker_enabled;

/* launcher.c */
extern void idem_launcher_init(void);
extern bool idem_is_preloaded(void);
extern bool idem_launcher_running(void);
extern void idem_launcher_welcome(void);
extern void idem_report_visit(bool has_extension);
extern PGDLLEXPORT void idem_launcher_main(Datum main_arg);

/* worker.c */
extern bool idem_in_worker;
extern void idem_pin_settings(void);
extern PGDLLEXPORT void idem_worker_main(Datum main_arg);

#endif							/* IDEM_WORKER_H */
