# Effects outside the database, against real servers: the second story of
# `make demo` in a smaller size.  Workers send email and charge cards, and are
# killed with kill -9 or frozen before, during and after the send.
#
# The story fails by itself where a promise is broken or no fault has struck;
# its figures are looked at once more here.

use strict;
use warnings;

use File::Basename;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $messages = 50;
my $struck = int($messages / 25);    # at least, of each kind, in each act
my @acts = ('skip', 'retry', 'reconcile', 'charge');
my @faults = (
	'killed before the send',
	'killed, half was sent',
	'killed before the answer',
	'killed before idem_complete',
	'killed after idem_complete',
	'frozen before the send',
	'frozen after the send');

IPC::Run::run([ '/usr/bin/python3', '-c', 'import psycopg, aiosmtpd' ],
	'2>', \my $missing)
  or plan skip_all => 'psycopg or aiosmtpd is missing';

my $node = idem_node('main', preload => 1);
$ENV{PGHOST} = $node->host;
$ENV{PGPORT} = $node->port;
$ENV{PGDATABASE} = 'postgres';

my ($out, $err) = ('', '');
my $timeout = IPC::Run::timeout(2 * $PostgreSQL::Test::Utils::timeout_default);
my $success = IPC::Run::run(
	[
		dirname(__FILE__) . '/../demo/run', 'outside',
		'--messages', $messages, '--workers', 4
	],
	'>', \$out, '2>', \$err, $timeout);
diag("$out$err") unless $success;
ok($success, 'the story kept its promises');
is($err, '', 'nothing was complained of');
note($out);

# The table: a name, and a figure for each act
my %figure;
foreach my $line (split /\n/, $out)
{
	my ($name, @cells) = split /\s{2,}/, $line;
	next unless @cells == @acts;
	tr/,//d foreach @cells;
	@{ $figure{$name} }{@acts} = @cells;
}

sub figures
{
	my ($name) = @_;
	return map { $figure{$name}{$_} // "no row $name" } @acts;
}

foreach my $fault (@faults)
{
	is((grep { /^\d+$/ && $_ >= $struck } figures($fault)),
		@acts, "in each act: $fault");
}
is_deeply([ figures('messages') ], [ ($messages) x 4 ], 'messages');
is($figure{duplicated}{skip}, 0, 'skip never duplicates');
cmp_ok($figure{missing}{skip}, '>', 0, 'skip loses');
cmp_ok($figure{missing}{skip}, '<=', $figure{'given up (skipped)'}{skip},
	'and marks as skipped what it may have lost');
is($figure{missing}{retry}, 0, 'retry never loses');
cmp_ok($figure{duplicated}{retry}, '>', 0, 'retry duplicates');
is("$figure{missing}{reconcile} $figure{duplicated}{reconcile}",
	'0 0', 'reconcile does neither');
like($out, qr/[1-9]\d* messages wait for a decision/, 'it listed what waits');
cmp_ok($figure{'of these: had been sent'}{reconcile}, '>', 0, 'some were there');
cmp_ok($figure{'of these: had not'}{reconcile}, '>', 0, 'some were not');
is("$figure{missing}{charge} $figure{duplicated}{charge}",
	'0 0', 'retry does neither where the destination knows the key');
cmp_ok($figure{'answered by the provider\'s key'}{charge},
	'>', 0, 'which had to answer some again');
cmp_ok($figure{'late holders told ID005'}{$_},
	'>', 0, "$_: a holder that was frozen is told that its lease is gone")
  foreach 'skip', 'retry', 'charge';
is_deeply([ figures('undecided at the end') ], [ (0) x 4 ],
	'nothing is left undecided');

is( $node->safe_psql(
		'postgres', q{
	SELECT count(*) FROM pg_stat_activity WHERE application_name = 'idem demo worker'
	UNION ALL SELECT count(*) FROM pg_database WHERE datname LIKE 'idem_demo%'}),
	"0\n0", 'nothing is left behind');

done_testing();
