// The page: the table at once, then the charts, and all charts again when the theme changes.

/** Unpack the charts' library and run it: packed, it is a third of its size. */
async function loadLibrary() {
  const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  script.remove();
}

async function drawCharts() {
  await Promise.all([
    drawReturns(), drawSchedules(), drawCoordinates(choose), drawImportance(), drawMarginals(), drawProfile(),
  ]);
}

const dark = matchMedia("(prefers-color-scheme: dark)");
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  root.dataset.theme = isDark ? "light" : "dark";
  drawCharts();
});
dark.addEventListener("change", drawCharts);

const [command, copies] = document.querySelectorAll("#winner code, #winner button");
copies.addEventListener("click", () => copy(command.textContent, copies));
makeTable(drawCharts);
await loadLibrary();
await drawCharts();
document.documentElement.dataset.ready = "";
