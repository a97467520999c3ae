# The protocol's function calls (PQfn, "fast path"), which reach a function
# without any statement around it: no expression says which types its arguments
# and its result have.
#
# libpq's only callers of it are the large object functions, so this speaks the
# protocol itself.

use strict;
use warnings;

use IO::Socket::UNIX;
use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

plan skip_all => 'no Unix sockets here' unless $use_unix_sockets;

my $node = idem_node('main');
my $socket = IO::Socket::UNIX->new(
	Peer => $node->host . '/.s.PGSQL.' . $node->port)
  or die "socket: $!";

sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

sub get
{
	my ($length) = @_;
	my $bytes = '';

	while (length $bytes < $length)
	{
		sysread($socket, $bytes, $length - length $bytes, length $bytes)
		  or die 'the server closed the connection';
	}
	return $bytes;
}

# Sends a message; returns the value of a function, or the fields SQLSTATE and
# message of an error, when the server is ready again.
sub ask
{
	my ($type, $body) = @_;
	my $answer = 'nothing';

	syswrite $socket, $type . pack('N', length($body) + 4) . $body;
	for (;;)
	{
		my ($kind, $length) = unpack 'aN', get(5);
		my $content = get($length - 4);

		return $answer if $kind eq 'Z';
		if ($kind eq 'E')
		{
			my %field = map { /^(.)(.*)$/s } split /\0/, $content;
			$answer = "$field{C} $field{M}";
		}
		elsif ($kind eq 'V')
		{
			my ($size, $value) = unpack 'Na*', $content;
			$answer = $size == 0xffffffff ? undef : $value;
		}
	}
}

sub query
{
	my ($sql) = @_;
	return ask('Q', "$sql\0");
}

# Calls a function; all values are text, undef is NULL.
sub call
{
	my ($signature, @args) = @_;
	my $function = sql("SELECT '$signature'::regprocedure::oid");

	return ask('F', pack('N n n', $function, 0, scalar @args)
		  . join('', map { defined $_ ? pack('N/a*', $_) : pack('N', 0xffffffff) } @args)
		  . pack('n', 0));
}

ask('', pack('N', 196608) . join("\0", user => sql('SELECT current_user'),
		database => 'postgres', '', ''));

my $claim = 'idem_claim(text,jsonb,interval,timestamptz,regclass)';
my $complete = 'idem_complete(text,text,bigint,regclass)';
my @defaults = (undef, undef, undef, 'idem_completions');

query('BEGIN');
is(call($claim, 'k', @defaults), '(t,claimed,,,,,)', 'claimed');
is(call($complete, 'k', '{"a":1.10}', undef, 'idem_completions'),
	'{"a":1.10}', 'completed');
query('COMMIT');
like(call($claim, 'k', @defaults), qr/^\(f,completed,"{""a"":1.10}",/, 'replayed');
is( sql(q{SELECT status, result FROM idem_lookup('k')}),
	'completed|{"a":1.10}', 'the record');

like(call($claim, 'unfinished', @defaults),
	qr/^ID006 /, 'a claim on its own is an error');
like(call($claim, '', @defaults), qr/^22023 /, 'a bad key');
like(call($claim, undef, @defaults), qr/^22004 /, 'no key');
like(call($claim, 'k', undef, undef, undef, undef), qr/^22004 /, 'no store');
like(call($claim, 'k'), qr/^08P01 /, 'too few arguments');

is(call('idem_once(text,jsonb,regclass)', 'once', undef, 'idem_completions'),
	't', 'the first time');
is(call('idem_once(text,jsonb,regclass)', 'once', undef, 'idem_completions'),
	'f', 'the second time');

# Polymorphic: only NULL has no type to be known
query('BEGIN');
call($claim, 'any', @defaults);
is( call('idem_complete(text,anyelement,bigint,regclass)',
		'any', undef, undef, 'idem_completions'),
	undef, 'a result that is null');
query('COMMIT');
like( call('idem_complete(text,anyelement,bigint,regclass)',
		'any', '1', undef, 'idem_completions'),
	qr/^0A000 /, 'a result of no type');
like(call('idem_key("any")', 'part'), qr/^0A000 /, 'parts of no type');
like(call('idem_lookup(text,regclass)', 'k', 'idem_completions'),
	qr/^0A000 /, 'a set');

# A handler; a record as the result
sql(q{CREATE FUNCTION handler(j jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT j'});
like( call('idem_run(text,text,jsonb,interval,timestamptz,regclass)',
		'run', 'handler', '[1]', undef, undef, 'idem_completions'),
	qr/^\(t,completed,\[1\],/, 'a handler ran');
sql(q{INSERT INTO idem_completions (key, status, lease_until)
	VALUES ('over', 'leased', '2000-01-01')});
like( call('idem_resolve(text,boolean,text,regclass)',
		'over', 'true', '1', 'idem_completions'),
	qr/^\(over,completed,/, 'an uncertain key is resolved');

is(query('SELECT 1'), 'nothing', 'the session is well');
$node->stop;
done_testing();
