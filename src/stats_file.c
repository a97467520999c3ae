/*-------------------------------------------------------------------------
 *
 * stats_file.c
 *	  The counters' file, which carries them over a clean restart.
 *
 * It is written by the postmaster when it has shut everything else down, to
 * another name first and then renamed, and removed as soon as it has been
 * read: counters of a server that crashed later are not to be taken for what
 * they no longer are.  The postmaster cannot tell an immediate shutdown from
 * a clean one when it writes; what pg_control says at the start can.
 *
 * A file that is not what it should be, by its length, its version or its
 * checksum, is reported once and ignored.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <unistd.h>

#include "catalog/pg_control.h"
#include "common/controldata_utils.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "port/pg_crc32c.h"
#include "storage/fd.h"

#include "stats.h"

#define FILE_NAME		PGSTAT_STAT_PERMANENT_DIRECTORY "/idem.stat"
#define FILE_NAME_TMP	FILE_NAME ".tmp"

/* To be changed with IdemStatsRow or the order of the counters */
#define FILE_MAGIC		0x6964656d
#define FILE_VERSION	1

typedef struct FileHeader
{
	uint32		magic;
	uint32		version;
	uint32		row_size;
	uint32		nrows;
	pg_crc32c	crc;			/* of the rows */
} FileHeader;

static pg_crc32c
checksum(const IdemStatsRow *rows, int nrows)
{
	pg_crc32c	crc;

	INIT_CRC32C(crc);
	COMP_CRC32C(crc, rows, sizeof(IdemStatsRow) * nrows);
	FIN_CRC32C(crc);
	return crc;
}

/*
 * Read the rows behind a good header; -1 if anything is wrong.
 */
static int
read_rows(FILE *file, IdemStatsRow *rows, int capacity)
{
	FileHeader	header;
	char		more;

	if (fread(&header, sizeof(header), 1, file) != 1 ||
		header.magic != FILE_MAGIC || header.version != FILE_VERSION ||
		header.row_size != sizeof(IdemStatsRow) ||
		header.nrows > (uint32) capacity ||
		fread(rows, sizeof(IdemStatsRow), header.nrows, file) !=
		header.nrows ||
		fread(&more, 1, 1, file) != 0 ||
		!EQ_CRC32C(checksum(rows, header.nrows), header.crc))
		return -1;
	return (int) header.nrows;
}

/*
 * Was the server shut down cleanly?  To be asked before it starts.
 */
static bool
was_shut_down(void)
{
	bool		crc_ok;
	ControlFileData *control = get_controlfile(DataDir, &crc_ok);
	bool		clean = crc_ok && (control->state == DB_SHUTDOWNED ||
								   control->state == DB_SHUTDOWNED_IN_RECOVERY);

	pfree(control);
	return clean;
}

/*
 * Read the file and remove it.  *origin says what the counters start from.
 */
int
idem_stats_file_read(IdemStatsRow *rows, int capacity, const char **origin)
{
	bool		clean = was_shut_down();
	FILE	   *file = clean ? AllocateFile(FILE_NAME, PG_BINARY_R) : NULL;
	int			nrows;

	if (file == NULL)
	{
		if (clean && errno != ENOENT)
			ereport(LOG,
					(errcode_for_file_access(),
					 errmsg("could not read file \"%s\": %m", FILE_NAME)));
		*origin = "zero: there was no clean shutdown before";
		ereport(LOG,
				(errmsg("counters of idem start from zero"),
				 errdetail("No clean shutdown has left any.")));
		(void) unlink(FILE_NAME);
		return 0;
	}
	nrows = read_rows(file, rows, capacity);
	FreeFile(file);
	if (nrows < 0)
	{
		*origin = "zero: the file of the last shutdown was invalid";
		ereport(LOG,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("ignoring invalid file \"%s\"", FILE_NAME),
				 errdetail("Counters of idem start from zero.")));
		nrows = 0;
	}
	else
		*origin = "the last clean shutdown";
	(void) unlink(FILE_NAME);
	return nrows;
}

/*
 * Write the file.  A failure is logged; the counters are then lost.
 */
void
idem_stats_file_write(const IdemStatsRow *rows, int nrows)
{
	FILE	   *file = AllocateFile(FILE_NAME_TMP, PG_BINARY_W);
	FileHeader	header;
	bool		good;

	memset(&header, 0, sizeof(header));
	header.magic = FILE_MAGIC;
	header.version = FILE_VERSION;
	header.row_size = sizeof(IdemStatsRow);
	header.nrows = nrows;
	header.crc = checksum(rows, nrows);
	good = file != NULL &&
		fwrite(&header, sizeof(header), 1, file) == 1 &&
		fwrite(rows, sizeof(IdemStatsRow), nrows, file) == (size_t) nrows;
	if (file != NULL && FreeFile(file) != 0)
		good = false;
	if (good)
		good = durable_rename(FILE_NAME_TMP, FILE_NAME, LOG) == 0;
	if (!good)
	{
		ereport(LOG,
				(errcode_for_file_access(),
				 errmsg("could not write file \"%s\": %m", FILE_NAME_TMP)));
		(void) unlink(FILE_NAME_TMP);
	}
}
