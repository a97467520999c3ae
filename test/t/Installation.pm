# Installations of PostgreSQL whose idem can be replaced: scripts and libraries of
# versions that do not exist, made from ours.
#
#     my $installation = installation('name');      a copy of the one in use
#     put_script($installation, '1.0--1.1', $text);
#     put_library($installation, $file);            as "make install" does
#     my $node = start_node('name', $installation, "work_mem = 1MB\n");
#     my $name = database($node, '1.0', 'SELECT 1');   with that version of idem
#     my $script = first_script();                  the text of idem--1.0.sql
#     $script = edited($script, qr/…/, '…');        it must match
#     my $part = part($script, qr/…/);

package Installation;

use strict;
use warnings;

use Cwd qw(abs_path);
use Exporter 'import';
use File::Basename;
use File::Path qw(make_path);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;

our @EXPORT = qw(installation put_script put_library start_node database
  source first_version first_script edited part);

# The directory of the sources
sub source
{
	return abs_path(dirname(__FILE__) . '/../../src');
}

# Where something is in the installation that is in use
sub config
{
	my ($what) = @_;
	my ($out, $err) = run_command([ 'pg_config', "--$what" ]);
	die $err unless $out;
	return $out;
}

# The server's programs once more, and beside them all that they load, but for
# idem's files, which are copies.  PostgreSQL finds its files from where its
# programs are.
sub installation
{
	my ($name) = @_;
	my $root = PostgreSQL::Test::Utils::tempdir($name);
	my ($bin, $lib, $share) = map { config($_) } 'bindir', 'pkglibdir', 'sharedir';

	make_path("$root$bin", "$root$lib", "$root$share/extension");
	system_or_bail('cp', '-L', (grep { -f } glob "$bin/*"), "$root$bin");
	foreach my $file (glob("$lib/*"), glob("$share/*"), glob("$share/extension/*"))
	{
		next
		  if $file eq "$share/extension"
		  || basename($file) =~ /^idem(--.*\.sql|\.control|\.so)$/;
		symlink $file, "$root$file" or die "$root$file: $!";
	}
	system_or_bail('cp', source() . '/../idem.control', glob(source() . '/idem--*.sql'),
		"$root$share/extension");
	system_or_bail('cp', "$lib/idem.so", "$root$lib");
	return {
		prefix => dirname("$root$bin"),
		scripts => "$root$share/extension",
		lib => "$root$lib",
	};
}

sub put_script
{
	my ($installation, $versions, $text) = @_;
	my $file = "$installation->{scripts}/idem--$versions.sql";

	open my $out, '>', $file or die "$file: $!";
	print $out $text;
	close $out or die "$file: $!";
	return;
}

# A new file takes the old one's name: what is loaded stays as it is.
sub put_library
{
	my ($installation, $file) = @_;

	system_or_bail('cp', $file, "$installation->{lib}/new");
	rename "$installation->{lib}/new", "$installation->{lib}/idem.so" or die $!;
	return;
}

sub start_node
{
	my ($name, $installation, $conf) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name,
		install_path => $installation->{prefix});

	$node->init;
	$node->append_conf('postgresql.conf', $conf) if $conf;
	$node->start;
	return $node;
}

# A database with a version of idem, or the default one; then statements.
my $databases = 0;

sub database
{
	my ($node, $version, @then) = @_;
	my $name = 'db' . ++$databases;
	my $which = $version ? "VERSION '$version'" : '';

	$node->safe_psql('postgres', "CREATE DATABASE $name");
	$node->safe_psql($name, join ";\n", 'SET client_min_messages = warning',
		"CREATE EXTENSION idem $which", @then);
	return $name;
}

# The oldest version that is installed by one script
sub first_version
{
	my ($first) = sort map { /idem--([^-]+)\.sql$/ } glob source() . '/idem--*.sql';
	return $first;
}

sub first_script
{
	return slurp_file(source() . '/idem--' . first_version() . '.sql');
}

# The part of a text that a pattern matches
sub part
{
	my ($text, $pattern) = @_;
	$text =~ /($pattern)/ or die "the script has no $pattern";
	return $1;
}

# A text with something else in the place of what a pattern matches, wherever
# that is: a string, or what a function returns for the match.
sub edited
{
	my ($text, $pattern, $replacement) = @_;

	part($text, $pattern);
	return $text =~ s/($pattern)/ref $replacement ? $replacement->($1) : $replacement/ger;
}

1;
