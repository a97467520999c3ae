# Bars with whiskers, one a comparison; report.py sets the terminal, the output
# and data: label, place, median, lower and upper quartile, target.
set label "Throughput of idem against the other side\n1 = as fast; whiskers: quartiles; diamond: target" at screen 0.5, screen 0.96 center
set xrange [0:*]
set yrange [-0.7:*]
set offsets 0, 0, 0.7, 0
set xlabel "times the throughput"
set grid xtics lc rgb "#dddddd"
set style fill solid 1.0 noborder
set boxwidth 0.6
set arrow from 1, graph 0 to 1, graph 1 nohead lc rgb "#444444" lw 1.5 front
set key off
set border 3
set tics nomirror
set lmargin 56
set tmargin 4
plot data using (0.5*$3):2:(0.5*$3):(0.3):($3 < 1 ? 0xd08770 : 0x5e81ac):ytic(1) with boxxyerror lc rgb variable, \
     data using 3:2:4:5 with xerrorbars pt 0 lw 1.5 lc rgb "#222222", \
     data using 6:2 with points pt 13 ps 1.6 lc rgb "#a3be8c"
