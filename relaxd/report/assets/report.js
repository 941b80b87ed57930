// Shows the report's charts, and lets its reader smooth, choose and zoom them.
"use strict";
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
  const data = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  const charts = new relaxdCharts.Charts(document.getElementById("charts"));
  charts.runs = [{ name: "", data }];
  const slider = document.getElementById("smoothing");
  slider.addEventListener("input", () => {
    charts.smoothing = Number(slider.value);
    slider.nextElementSibling.textContent = slider.value;
  });
  const filter = document.getElementById("filter");
  filter.addEventListener("input", () => { charts.filter = filter.value; });
  document.getElementById("reset").addEventListener("click", () => charts.showAll());
})();
