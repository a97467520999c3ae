# What the TAP tests share: a server with idem, and sessions that may block.
#
#     my $node = idem_node('main', preload => 1, conf => "work_mem = 1MB\n");
#     my $one = session($node);
#     my $two = session($node, 'otherdb');
#     $one->query('BEGIN');                  the rows, or it dies of the error
#     like($one->error('SELECT 1/0'), qr/22012/);      an error is expected
#     $two->send('SELECT …');                does not wait for the answer
#     $two->wait_blocked;                    until it waits for a lock
#     is($two->answer, 'f');                 as query; answer_error as error
#     $two->kill9;                           the client dies, without a word
#
# Errors are psql's verbose ones: "ERROR:  ID001: …", DETAIL, HINT.

package Idem;

use strict;
use warnings;

use Exporter 'import';
use PostgreSQL::Test::Cluster;

our @EXPORT = qw(idem_node session);

# A started server whose database postgres has the extension.
sub idem_node
{
	my ($name, %option) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);

	$node->init(%{ $option{init} // {} });
	$node->append_conf('postgresql.conf',
		"shared_preload_libraries = 'idem'\n")
	  if $option{preload};
	$node->append_conf('postgresql.conf', $option{conf}) if $option{conf};
	$node->start;
	$node->safe_psql('postgres', 'CREATE EXTENSION idem');
	return $node;
}

sub session
{
	return Idem::Session->new(@_);
}

package Idem::Session;

use Carp;
use IPC::Run;
use PostgreSQL::Test::Utils;

my $failure = qr/^(psql:\S+ )?(ERROR|FATAL|PANIC): |connection to server was lost/m;

sub new
{
	my ($class, $node, $database) = @_;
	my $self = bless { node => $node, in => '', out => '', err => '' }, $class;

	$self->{number} = 0;
	$self->{timeout} =
	  IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default);
	$self->{psql} = IPC::Run::start(
		[
			$node->installed_command('psql'), '-XAtq',
			'-v', 'VERBOSITY=verbose',
			'-d', $node->connstr($database // 'postgres'),
			'-f', '-'
		],
		'<', \$self->{in}, '>', \$self->{out}, '2>', \$self->{err},
		$self->{timeout});
	$self->{pid} = $self->query('SELECT pg_backend_pid()');
	return $self;
}

# The process id of the backend.
sub pid
{
	my ($self) = @_;
	return $self->{pid};
}

sub send
{
	my ($self, $sql) = @_;

	croak 'the answer before has not been fetched' if $self->{sent};
	$self->{sent} = 'done ' . ++$self->{number};
	$self->{timeout}->start;
	$self->{in} .= "$sql\n;\n\\echo $self->{sent}\n\\warn $self->{sent}\n";
	$self->{psql}->pump_nb;
	return;
}

# Waits for both streams' end marks, or for the end of psql; returns both.
sub _receive
{
	my ($self) = @_;
	my $mark = $self->{sent} // croak 'nothing was sent';
	my $end = qr/^\Q$mark\E\n/m;
	my @received;

	while (!($self->{out} =~ $end && $self->{err} =~ $end)
		&& $self->{psql}->pumpable)
	{
		$self->{psql}->pump;
	}
	$self->{timeout}->reset;
	$self->{sent} = undef;
	@received = ($self->{out}, $self->{err});
	($self->{out}, $self->{err}) = ('', '');
	s/$end//, chomp foreach @received;
	return @received;
}

sub answer
{
	my ($self) = @_;
	my ($rows, $messages) = $self->_receive;

	croak $messages if $messages =~ $failure;
	return $rows;
}

sub answer_error
{
	my ($self) = @_;
	my ($rows, $messages) = $self->_receive;

	croak "no error, but: $rows$messages" unless $messages =~ $failure;
	return $messages;
}

sub query
{
	my ($self, $sql) = @_;
	$self->send($sql);
	return $self->answer;
}

sub error
{
	my ($self, $sql) = @_;
	$self->send($sql);
	return $self->answer_error;
}

sub wait_blocked
{
	my ($self) = @_;
	$self->{node}->poll_query_until('postgres',
		"SELECT wait_event_type = 'Lock' FROM pg_stat_activity "
		  . "WHERE pid = $self->{pid}")
	  or croak 'it never waited for a lock';
	return;
}

# The client is gone at once; the backend finds out when it next talks to it.
sub kill9
{
	my ($self) = @_;
	$self->{psql}->kill_kill(grace => 0);
	return;
}

sub quit
{
	my ($self) = @_;
	$self->{in} .= "\\q\n";
	$self->{psql}->finish;
	return;
}

1;
