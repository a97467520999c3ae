# Plays a file of test/clients/contract/ through Perl's DBI and DBD::Pg.
#
#     perl contract.pl FILE PREFIX PORT LOST-REPLY-PORT LOST-REQUEST-PORT [OPTION]...
#
# Options: prepare=0 (nothing is prepared on the server, as poolers like it),
# prepare=2 (each statement is, from its first use), and pooling=MODE, which
# only says which cases are wanted.
#
# The last line is "N passed, N failed".

use strict;
use warnings;

use DBD::Pg qw(:async :pg_types);
use DBI;
use List::Util qw(any);
use Time::HiRes qw(sleep);

binmode STDOUT, ':encoding(UTF-8)';
$| = 1;

my $patience = 60;    # seconds
my ($file, $prefix, $plain, $reply, $request, @options) = @ARGV;
my %port = ('lost-reply' => $reply, 'lost-request' => $request);
my (%connection, %sth, %name);

# The cases that are for our options: { title, steps }.
sub read_cases
{
	my @cases;
	my $number = 0;

	open my $in, '<:encoding(UTF-8)', $file or die "$file: $!\n";
	while (my $line = <$in>)
	{
		$number++;
		chomp $line;
		next if $line =~ /^\s*$|^#/;
		my ($indent, $word, $rest) = $line =~ /^( *)(\S+) ?(.*)$/;
		if ($word eq '==')
		{
			push @cases, { title => $rest, steps => [], wanted => 1 };
		}
		elsif (!$indent)
		{
			my ($verb, $text) = $rest =~ /^(\S+) ?(.*)$/;
			push @{ $cases[-1]{steps} },
			  {
				number => $number,
				connection => $word,
				verb => $verb,
				rest => $text,
				args => [],
			  };
		}
		elsif (my $step = $cases[-1]{steps}[-1])
		{
			read_detail($step, $word, $rest);
		}
		else
		{
			my $has = any { $_ eq $rest } @options;
			$cases[-1]{wanted} &&= $word eq 'only' ? $has : !$has;
		}
	}
	return grep { $_->{wanted} } @cases;
}

sub read_detail
{
	my ($step, $word, $rest) = @_;

	if ($word eq 'arg') { push @{ $step->{args} }, [ text => $rest ] }
	elsif ($word eq 'int') { push @{ $step->{args} }, [ int => $rest ] }
	elsif ($word eq 'null') { push @{ $step->{args} }, [ text => undef ] }
	elsif ($word eq 'array')
	{
		my @items = map { $_ eq 'NULL' ? undef : $_ } split /\|/, $rest;
		push @{ $step->{args} }, [ array => \@items ];
	}
	elsif ($word eq 'row') { push @{ $step->{rows} }, $rest }
	elsif ($word eq 'no') { $step->{rows} = [] }
	elsif ($word eq 'lost') { $step->{error} = 'lost' }
	elsif ($word =~ /^(error|keep)$/) { $step->{$word} = $rest }
	else { die "line $step->{number}: what is $word?\n" }
	return;
}

sub fill
{
	my ($text) = @_;

	return [ map { fill($_) } @$text ] if ref $text;
	return $text unless defined $text;
	foreach my $name (keys %name)
	{
		$text =~ s/\{$name\}/$name{$name}/g;
	}
	return $text;
}

sub as_text
{
	my ($value, $type) = @_;

	return 'NULL' unless defined $value;
	return $value ? 't' : 'f' if $type eq 'bool';
	return $value;
}

sub find_connection
{
	my ($name) = @_;
	my $port = $port{$name} // $plain;
	my ($prepare) = map { /^prepare=(.*)/ } @options;

	$connection{$name} //= DBI->connect(
		"dbi:Pg:host=127.0.0.1;port=$port",
		undef, undef,
		{
			AutoCommit => 1,
			RaiseError => 1,
			PrintError => 0,
			PrintWarn => 0,
			pg_enable_utf8 => 1,
			defined $prepare
			? (pg_server_prepare => $prepare > 0,
				pg_switch_prepared => $prepare)
			: ()
		});
	return $connection{$name};
}

sub execute
{
	my ($dbh, $step, $sql, %attributes) = @_;
	my $sth = $dbh->prepare($sql, \%attributes);
	my $number = 0;

	foreach my $arg (@{ $step->{args} })
	{
		my ($kind, $value) = @$arg;
		$value = fill($value);
		$sth->bind_param(++$number, $value,
			$kind eq 'int' ? { pg_type => PG_INT4 } : undef);
	}
	$sth->execute;
	return $sth;
}

# undef, or the rows where they are not as they should be
sub rows_differ
{
	my ($step, $sth) = @_;
	my @rows;

	return unless $sth && $sth->{NUM_OF_FIELDS};
	while (my $row = $sth->fetchrow_arrayref)
	{
		$name{ $step->{keep} } = $row->[0] if $step->{keep};
		push @rows, join '|',
		  map { as_text($row->[$_], $sth->{pg_type}[$_]) } 0 .. $#$row;
	}
	return unless $step->{rows};
	my @expected = map { fill($_) } @{ $step->{rows} };
	return if "@rows" eq "@expected" && @rows == @expected;
	return join "\n", 'rows:', @rows;
}

sub play
{
	my ($step) = @_;
	my ($name, $verb, $rest) = @{$step}{qw(connection verb rest)};
	my $dbh = find_connection($name);
	my ($sth, $differs);

	if ($verb eq 'begin')
	{
		$dbh->begin_work;
		$dbh->do("SET TRANSACTION ISOLATION LEVEL $rest") if $rest;
	}
	elsif ($verb eq 'commit') { $dbh->commit }
	elsif ($verb eq 'savepoint') { $dbh->pg_savepoint($rest) }
	elsif ($verb eq 'rollback' && $rest =~ /^to (\w+)$/)
	{
		$dbh->pg_rollback_to($1);
	}
	elsif ($verb eq 'rollback') { $dbh->rollback }
	elsif ($verb eq 'close') { $dbh->disconnect }
	elsif ($verb eq 'start')
	{
		$sth{$name} = execute($dbh, $step, $rest, pg_async => PG_ASYNC);
	}
	elsif ($verb eq 'finish')
	{
		$dbh->pg_result;
		$differs = rows_differ($step, $sth{$name});
	}
	elsif ($verb eq 'until')
	{
		my $end = time + $patience;
		while ($differs =
			rows_differ($step, execute($dbh, $step, $rest)))
		{
			last if time > $end;
			sleep 0.02;
		}
	}
	elsif ($verb eq 'run')
	{
		$differs = rows_differ($step, execute($dbh, $step, $rest));
	}
	else { die "what is $verb?" }
	return $differs;
}

# Plays a step; dies if the contract is broken.
sub check
{
	my ($step) = @_;
	my $differs;
	my $outcome = '';
	my $said = '';

	unless (eval { $differs = play($step); 1 })
	{
		my $dbh = $connection{ $step->{connection} };
		$said = $@;
		$outcome = $dbh ? $dbh->state : '';
		# DBI's state for whatever has none; 08000 is DBD::Pg's for a lost line
		$outcome = 'lost' if $outcome =~ /^(08\d\d\d|S1000)?$/ && !$dbh->ping;
	}
	die "line $step->{number}: $differs\n" if defined $differs;
	die "line $step->{number}: '$outcome' $said\n"
	  if $outcome ne ($step->{error} // '');
	return;
}

my ($passed, $failed) = (0, 0);
my $number = 0;
foreach my $case (read_cases())
{
	%name = (key => "$prefix:" . ++$number);
	if (eval { check($_) foreach @{ $case->{steps} }; 1 })
	{
		$passed++;
		print "ok - $case->{title}\n";
	}
	else
	{
		$failed++;
		print "not ok - $case->{title}: $@";
	}
	%sth = ();
	eval { $_->disconnect } foreach values %connection;
	%connection = ();
}
print "$passed passed, $failed failed\n";
exit($failed > 0 || $passed == 0);
