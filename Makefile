# idem: idempotency keys inside PostgreSQL.  `make help` lists the targets.
#
# The file has two halves.  The targets of the house (check, demo, …) must
# work on a machine that has no PostgreSQL yet, and PGXS has a "check" of its
# own that only says "not supported"; so PGXS is included only where none of
# the house's targets is asked for.  `make check install` works all the same:
# the house hands what it does not know to a make of its own.

PG_CONFIG ?= pg_config
export PG_CONFIG

HOUSE = check cassert coverage demo bench torture fuzz deps lint dist help ubsan valgrind

# Writing into PostgreSQL's directories takes root.  As another user the house
# asks sudo, unless those directories are the user's own.
SUDO = $(if $(filter 0,$(shell id -u)),,$(if $(shell \
	test -w "`$(PG_CONFIG) --pkglibdir`" && echo yes),,sudo))
MAKE_INSTALL = $(SUDO) $(MAKE) --no-print-directory install \
	PG_CONFIG="$(PG_CONFIG)"

ifneq (,$(filter $(HOUSE),$(MAKECMDGOALS)))

OTHERS = $(filter-out $(HOUSE),$(MAKECMDGOALS))
.PHONY: $(HOUSE) $(OTHERS)
.NOTPARALLEL:

#:  check         install what the tests need, build, install, and run them all
check:
	test/deps all
	+$(MAKE) --no-print-directory all
	+$(MAKE_INSTALL)
	test/check

#:  cassert       tests on a server built with assertions (apt-get source)
cassert:
	test/deps all
	test/deps server
	test/cassert

#:  valgrind      the same under valgrind
valgrind:
	test/deps server
	test/valgrind

#:  ubsan         tests on an idem that looks for undefined behaviour
ubsan:
	test/deps all
	test/ubsan

#:  coverage      which lines the tests run; the report is coverage/index.html
coverage:
	test/deps all
	test/coverage

#:  demo          two stories: double billing, and email that workers die over
demo:
	test/deps demo
	+$(MAKE) --no-print-directory all
	+$(MAKE_INSTALL)
	test/with-cluster test/demo/run $(DEMO_ARGS)

#:  bench         idem against hand-written SQL; SIZE=large adds 10 million keys
bench:
	test/deps bench
	+$(MAKE) --no-print-directory all
	+$(MAKE_INSTALL)
	test/bench/run $(if $(SIZE),--size $(SIZE)) $(BENCH_ARGS)

#:  torture       SECONDS=3600 SEED=1: crashes, failovers, cut connections, at random
torture:
	test/deps torture
	+$(MAKE) --no-print-directory all
	+$(MAKE_INSTALL)
	test/torture/run --seconds $(or $(SECONDS),60) --seed $(or $(SEED),1)

#:  fuzz          hostile input, for SECONDS=600 on each target
fuzz:
	test/deps all
	+$(MAKE) --no-print-directory all
	+$(MAKE_INSTALL)
	test/fuzz/run $(or $(SECONDS),600)
	test/with-cluster -o shared_preload_libraries=idem -o idem.worker=off \
		test/fuzz/arguments --calls 50000 --seed $(or $(SEED),1)

#:  deps          install what building and testing need (Debian, Ubuntu)
deps:
	test/deps all

#:  lint          warnings as errors, assert build, cppcheck, clang-tidy, layout
lint:
	test/lint

#:  dist          a PGXN archive of the committed tree
DIST = idem-$(shell sed -n 's/^   "version": "\(.*\)",$$/\1/p' META.json)
dist:
	git archive --format=zip --prefix=$(DIST)/ -o $(DIST).zip HEAD
	@echo $(DIST).zip

help:
	@echo 'Targets; PG_CONFIG=/path/to/pg_config names another PostgreSQL:'
	@sed -n 's/^#://p' Makefile

$(OTHERS):
	+$(MAKE) --no-print-directory $@

else # what PGXS does

#:  all           build idem (the default)
#:  install       install it into the PostgreSQL of PG_CONFIG
#:  installcheck  regression and isolation tests on the server PG* points to
#:  clean         remove what was built and what the tests left
#:  uninstall     remove idem's files from that PostgreSQL
#:  help          this list

EXTENSION = idem
MODULE_big = idem
OBJS = $(patsubst %.c,%.o,$(sort $(wildcard src/*.c)))
DATA = $(sort $(wildcard src/idem--*.sql)) $(sort $(wildcard src/monitoring/*))
PGFILEDESC = "idem - idempotency keys"

# Warnings are wanted here, but a newer compiler's must not break an install:
# only `make lint` turns them into errors.  The two that are off fire in
# PostgreSQL's own headers and calling conventions.
PG_CFLAGS = -Wextra -Wno-unused-parameter -Wno-sign-compare

# pg_regress runs the named tests one after the other, each alone.
REGRESS := $(sort $(basename $(notdir $(wildcard sql/*.sql))))
REGRESS_OPTS = --encoding=UTF8 --no-locale
ISOLATION := $(sort $(basename $(notdir $(wildcard test/specs/*.spec))))
ISOLATION_OPTS = --inputdir=test --load-extension=idem \
	--encoding=UTF8 --no-locale
EXTRA_CLEAN = results regression.diffs regression.out output_iso tmp_check \
	coverage $(wildcard idem-*.zip)

PGXS := $(shell $(PG_CONFIG) --pgxs 2>/dev/null)
ifeq (,$(wildcard $(PGXS)))
$(error No PostgreSQL to build with: $(PG_CONFIG) --pgxs names no file. \
Install its development package ("make deps" does on Debian and Ubuntu), \
or set PG_CONFIG)
endif

# Bitcode for the JIT compiler is made only where the compiler that this
# PostgreSQL was configured with is there.
CLANG_USED := $(shell sed -n 's/^CLANG *= *//p' $(dir $(PGXS))../Makefile.global)
ifeq (,$(shell command -v $(firstword $(CLANG_USED)) 2>/dev/null))
override with_llvm := no
endif

include $(PGXS)

# PGXS knows of no headers: any change in one builds everything anew.
$(OBJS) $(OBJS:.o=.bc): $(wildcard src/*.h)

endif
